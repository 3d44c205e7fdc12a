"""A fingerprint of weights that does not depend on their names and shapes.

The fingerprint is the sum, modulo 2^64, of a hash of every element's bits in the rollout's dtype. A sum is independent
of order, names, fusing (q, k, v into one matrix) and concatenation over tensor-parallel ranks. The hash of zero is
zero, so the zero rows that engines add to the vocabulary have no effect either.

Changing one element always changes the fingerprint, because the hash is a bijection of the 32 bits. Changing several
keeps it with a chance of about 2^-32. A permutation of the elements is not detected. This is a check against stale and
damaged weights, not a cryptographic digest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

NamedTensor = tuple[str, torch.Tensor]

ADAPTER_ENDINGS = (".lora_A", ".lora_B")

# On the CPU one chunk and its temporaries fit into a core's cache (measured: 0.3 to 1.1 elements/ns, best at 2^16). A
# GPU needs few launches.
CHUNK_CPU = 1 << 16
CHUNK_CUDA = 1 << 24

# Odd multipliers of MurmurHash3's 32-bit finalizer (Appleby), as signed numbers.
_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))


def fingerprint(named_tensors: Iterable[NamedTensor], dtype: torch.dtype) -> int:
    """Return the fingerprint in [0, 2^64) of tensors; those that share memory count once.

    Reads each tensor once, at about 4 GB/s on one CPU core in float32.

    Args:
        named_tensors: all of them must be alive until the end, because memory addresses identify them.
        dtype: a floating-point type of 2 or 4 bytes, to which every tensor is cast first.
    """
    total, seen = 0, set()
    for _, tensor in named_tensors:
        address = (tensor.device, tensor.data_ptr(), tensor.numel())
        if address not in seen:
            seen.add(address)
            total += tensor_hash(tensor, dtype)
    return total % (1 << 64)


@dataclass(frozen=True)
class WeightNames:
    """The names of all weights of a model.

    own: one name of every weight (parameters and saved buffers).
    tied: second names of some weights (a tied `lm_head.weight`).
    """

    own: frozenset[str]
    tied: frozenset[str]

    @classmethod
    def of(cls, model: torch.nn.Module) -> "WeightNames":
        """Return the names of a Hugging Face model, which may be on the meta device."""
        tied_keys: Any = model.all_tied_weights_keys  # transformers adds it to every model
        tied = frozenset(tied_keys)
        return cls(own=frozenset(model.state_dict()) - tied, tied=tied)


class WeightStream:
    """Passes weights on to an engine and fingerprints them, so that nothing is kept or read twice.

    Weights under tied names are neither passed on nor counted. An unknown name raises KeyError during iteration.
    Adapters (`is_adapter`) must belong to a weight of the model. expected: names that count as `missing` until they
    arrive; default: all weights.
    """

    def __init__(
        self,
        weights: Iterable[NamedTensor],
        names: WeightNames,
        *,
        dtype: torch.dtype,
        expected: Iterable[str] | None = None,
    ):
        self._weights, self._names, self._dtype = iter(weights), names, dtype
        self._total = 0
        self.missing = set(names.own if expected is None else expected)

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._weights:
            if name in self._names.tied:
                continue
            if (adapted_weight(name) if is_adapter(name) else name) not in self._names.own:
                raise KeyError(f"weight {name!r} was pushed, but the model has none of this name")
            self.missing.discard(name)
            self._total += tensor_hash(tensor, pushed_dtype(name, self._dtype))
            yield name, tensor

    @property
    def fingerprint(self) -> int:
        """The fingerprint of the weights passed on so far."""
        return self._total % (1 << 64)


class ArrivingWeights:
    """Fingerprints weights as an engine reads them, for engines whose own tensors cannot be read. Iterate once."""

    def __init__(self, weights: Iterable[NamedTensor], *, dtype: torch.dtype) -> None:
        self._weights, self._dtype, self._total = iter(weights), dtype, 0

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._weights:
            self._total += tensor_hash(tensor, pushed_dtype(name, self._dtype))
            yield name, tensor

    def drain(self) -> int:
        """Consume the weights that the engine did not read, and return their number.

        Iterating may be a collective call of all training ranks, so a rank that stops early would block the others.
        """
        return sum(1 for _ in self._weights)

    @property
    def fingerprint(self) -> int:
        """The fingerprint of the weights that the engine has read."""
        return self._total % (1 << 64)


def is_adapter(name: str) -> bool:
    """Return whether this names a low-rank adapter's matrix, {layer}.lora_A or {layer}.lora_B."""
    return name.endswith(ADAPTER_ENDINGS)


def adapted_weight(name: str) -> str:
    """Return the name of the weight that an adapter's matrix belongs to."""
    return f"{name.rpartition('.')[0]}.weight"


def pushed_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is pushed and hashed.

    It is the rollout's, but float32 for adapters, whose small values are added to large ones.
    """
    return torch.float32 if is_adapter(name) else dtype


@torch.no_grad()
def tensor_hash(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the tensor's part of the fingerprint: the sum of its element hashes, as an unbounded integer."""
    if tensor.numel() == 0:
        return 0
    flat = tensor.detach().to(dtype).reshape(-1)
    chunks = flat.split(CHUNK_CUDA if flat.is_cuda else CHUNK_CPU)
    return int(torch.stack([_hash_bits(_bits(chunk)).sum(dtype=torch.int64) for chunk in chunks]).sum())


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the elements' bit patterns as int32; zero stays zero."""
    if values.element_size() == 4:
        return values.view(torch.int32)
    if values.element_size() == 2:
        return values.view(torch.int16).to(torch.int32)
    raise ValueError(f"fingerprint works on 2- and 4-byte dtypes, not {values.dtype}")


def _hash_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return a bijective mix of each int32, with 0 -> 0 (multiply and xor-shift, as MurmurHash3's finalizer does)."""
    mixed = bits * _MULTIPLIERS[0]
    mixed ^= (mixed >> 15) & 0x1FFFF  # the mask turns the arithmetic shift into a logical one
    mixed *= _MULTIPLIERS[1]
    mixed ^= (mixed >> 13) & 0x7FFFF
    return mixed
