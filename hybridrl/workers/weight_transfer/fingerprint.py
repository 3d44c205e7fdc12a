"""A number that says which weights an engine holds, whatever it did to their names and shapes.

The fingerprint is the sum, modulo 2^64, of a hash of every element's bits in the rollout's dtype. A sum does not see
order, names, fusing (q, k, v into one matrix) or concatenation over tensor-parallel ranks; the hash of zero is zero, so
it does not see the zero rows that engines add to the vocabulary either. Changing one element always changes it (the
hash is a bijection of the 32 bits); changing several leaves it alone with a chance of about 2^-32. It cannot see a
permutation of the elements.

This is a check against stale and damaged weights, not a cryptographic digest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

Named = tuple[str, torch.Tensor]

ADAPTER_ENDINGS = (".lora_A", ".lora_B")

# One chunk and its temporaries stay in a core's cache (measured: 0.3 to 1.1 elements/ns, best at 2^16); a GPU wants few
# launches.
CHUNK_CPU = 1 << 16
CHUNK_CUDA = 1 << 24

# Odd multipliers of MurmurHash3's 32-bit finalizer (Appleby), as signed numbers.
_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))


def fingerprint(named_tensors: Iterable[Named], dtype: torch.dtype) -> int:
    """Return the fingerprint in [0, 2^64) of tensors that are all alive; those that share memory count once.

    dtype: a floating-point type of 2 or 4 bytes; every tensor is cast to it first. Reads each tensor once, about 4 GB/s
    on one CPU core in float32.
    """
    total, seen = 0, set()
    for _, tensor in named_tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.numel())
        if place not in seen:
            seen.add(place)
            total += tensor_hash(tensor, dtype)
    return total % (1 << 64)


@dataclass(frozen=True)
class WeightNames:
    """Which names a whole set of weights has.

    own: one name of every weight (parameters and saved buffers). tied: second names of some of them (a tied
    `lm_head.weight`).
    """

    own: frozenset[str]
    tied: frozenset[str]

    @classmethod
    def of(cls, model: torch.nn.Module) -> "WeightNames":
        """Return the names of a Hugging Face model, which may be on the meta device."""
        tied = frozenset(model.all_tied_weights_keys)
        return cls(own=frozenset(model.state_dict()) - tied, tied=tied)


class WeightStream:
    """Passes weights on to an engine and fingerprints what it passes, so that nothing has to be kept or read twice.

    Weights under tied names are neither passed on nor counted; an unknown name is a KeyError at the point of iteration.
    Adapters (`is_adapter`) belong to a weight that the model has. awaited: what is `missing` until it comes; default:
    all weights.
    """

    def __init__(
        self, weights: Iterable[Named], names: WeightNames, *, dtype: torch.dtype, awaited: Iterable[str] | None = None
    ):
        self._weights, self._names, self._dtype = iter(weights), names, dtype
        self._total = 0
        self.missing = set(names.own if awaited is None else awaited)

    def __iter__(self) -> Iterator[Named]:
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
        """Return the fingerprint of what was passed on so far."""
        return self._total % (1 << 64)


def is_adapter(name: str) -> bool:
    """Return whether this is a low-rank adapter's matrix, {layer}.lora_A or {layer}.lora_B, and no
    weight of the model.
    """
    return name.endswith(ADAPTER_ENDINGS)


def adapted_weight(name: str) -> str:
    """Return the name of the weight that an adapter's matrix belongs to."""
    return f"{name.rpartition('.')[0]}.weight"


def pushed_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is pushed and hashed: the rollout's, but float32 for adapters, which are
    small, and added up.
    """
    return torch.float32 if is_adapter(name) else dtype


@torch.no_grad()
def tensor_hash(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the sum of the element hashes in this dtype, as an unbounded integer: a part of the fingerprint."""
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
