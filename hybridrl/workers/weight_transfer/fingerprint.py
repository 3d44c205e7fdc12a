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

import numpy as np
import torch

NamedTensor = tuple[str, torch.Tensor]

ADAPTER_ENDINGS = (".lora_A", ".lora_B")
SCALE_ENDING = "_scale_inv"
"""Of the scales of a quantised weight; see `quantize`."""
QUANTIZED = frozenset({torch.float8_e4m3fn, torch.int8})
"""Dtypes of quantised weights, which are sent, held and hashed as they are."""


@dataclass(frozen=True)
class Float32:
    """Tensors that a rollout holds in float32, whatever its dtype, because it computes with them in float32.

    Attributes:
        ending: Of their names.
        reason: What they do, and in which families.
        families: Values of `model_type` to which the row is limited; empty: all.
        everywhere: Whether every engine holds them so. Else only one with the capability `float32_weights`.
    """

    ending: str
    reason: str
    families: frozenset[str] = frozenset()
    everywhere: bool = False


ROUTERS = frozenset({"deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "nemotron_h"})
FLOAT32 = (
    Float32(".e_score_correction_bias", "chooses experts: DeepSeek-V3, GLM-4.5 and later, Nemotron-H", everywhere=True),
    Float32(".A_log", "decay of a state, an exponent of an exponent: gated delta rule, Mamba", everywhere=True),
    Float32(".dt_bias", "time step of a recurrent state: gated delta rule, Mamba"),
    Float32(".sinks", "one logit of the softmax over attention weights: gpt-oss"),
    Float32(".gate.weight", "router whose logits are float32: GLM-4-MoE", frozenset({"glm4_moe"}), everywhere=True),
    Float32(".gate.weight", f"router whose logits are float32: {', '.join(sorted(ROUTERS))}", ROUTERS),
)
"""The only list of such tensors. vLLM holds the last three kinds in its own dtype, but GLM-4-MoE's routers."""


@dataclass(frozen=True)
class HeldDtypes:
    """The dtypes of a model's weights in a rollout: its own, and float32 for some.

    Attributes:
        dtype: Of most weights.
        float32: Endings of the others' names.
    """

    dtype: torch.dtype
    float32: tuple[str, ...]

    @classmethod
    def of(cls, dtype: torch.dtype, *, model_type: str = "", float32_weights: bool = False) -> "HeldDtypes":
        """Return those of a model.

        Args:
            dtype: The rollout's.
            model_type: Of the text model's configuration.
            float32_weights: The rollout's capability.
        """
        rows = [row for row in FLOAT32 if not row.families or model_type in row.families]
        return cls(dtype, tuple(row.ending for row in rows if row.everywhere or float32_weights))


Dtypes = torch.dtype | HeldDtypes
"""A plain dtype stands for a model of unknown type in an engine without the capability `float32_weights`."""

# On the CPU one chunk and its temporaries fit into a core's cache. A GPU needs few launches.
CHUNK_CPU = 1 << 16
CHUNK_CUDA = 1 << 24

_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
"""Odd multipliers of MurmurHash3's 32-bit finalizer (Appleby)."""


def fingerprint(named_tensors: Iterable[NamedTensor], dtype: Dtypes) -> int:
    """Return the fingerprint in [0, 2^64) of tensors; those that share memory count once.

    Reads each tensor once, on one CPU core or on the tensor's GPU.

    Args:
        named_tensors: all of them must be alive until the end, because memory addresses identify them.
        dtype: a floating-point type of 2 or 4 bytes, to which tensors that are not quantised are cast first
            (`pushed_dtype`).
    """
    own = distinct_tensors(named_tensors)
    return sum(tensor_hash(tensor, pushed_dtype(name, dtype)) for name, tensor in own) % (1 << 64)


def distinct_tensors(named_tensors: Iterable[NamedTensor]) -> list[NamedTensor]:
    """Return the tensors; of those that share memory the first one."""
    found: dict[tuple[torch.device, int, int], NamedTensor] = {}
    for name, tensor in named_tensors:
        found.setdefault((tensor.device, tensor.data_ptr(), tensor.numel()), (name, tensor))
    return [*found.values()]


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
    """Passes weights on to an engine in the dtype of the push, and fingerprints them.

    Weights under tied names are neither passed on nor counted. An unknown name raises KeyError during iteration.
    Adapters (`is_adapter`) must belong to a weight of the model.

    Args:
        weights: Adapters first.
        names: Of the model's weights.
        dtype: The rollout's.
        expected: Names that count as `missing` until they arrive; default: all weights.
        is_hashed: False: the sender has the fingerprint, and the engine's own is compared with it. With adapters, which
            the engine does not hold, weights are fingerprinted nevertheless.
    """

    def __init__(
        self,
        weights: Iterable[NamedTensor],
        names: WeightNames,
        *,
        dtype: Dtypes,
        expected: Iterable[str] | None = None,
        is_hashed: bool = True,
    ):
        self._weights, self._names, self._dtype = iter(weights), names, dtype
        self.is_hashed, self._total = is_hashed, 0
        self.missing = set(names.own if expected is None else expected)

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._weights:
            if name in self._names.tied:
                continue
            weight = adapted_weight(name) if is_adapter(name) else name.removesuffix(SCALE_ENDING)
            if weight not in self._names.own:
                raise KeyError(f"weight {name!r} was pushed, but the model has none of this name")
            self.missing.discard(name)
            passed = as_pushed(name, tensor, self._dtype)
            self.is_hashed = self.is_hashed or is_adapter(name)
            if self.is_hashed:
                self._total += tensor_hash(passed, passed.dtype)
            yield name, passed

    @property
    def fingerprint(self) -> int:
        """The fingerprint of the weights passed on so far, if it `is_hashed`."""
        return self._total % (1 << 64)


class ArrivingWeights:
    """Fingerprints weights as an engine reads them, for engines whose own tensors cannot be read. Iterate once."""

    def __init__(self, weights: Iterable[NamedTensor], *, dtype: Dtypes) -> None:
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


def pushed_dtype(name: str, dtype: Dtypes) -> torch.dtype:
    """Return the dtype in which a tensor is pushed, held and hashed.

    It is the rollout's, but float32 for adapters, whose small values are added to large ones, for scales, and for
    `FLOAT32`.
    """
    held = dtype if isinstance(dtype, HeldDtypes) else HeldDtypes.of(dtype)
    is_float32 = is_adapter(name) or is_scale(name) or name.endswith(held.float32)
    return torch.float32 if is_float32 else held.dtype


def as_pushed(name: str, tensor: torch.Tensor, dtype: Dtypes) -> torch.Tensor:
    """Return a tensor as it is pushed to a rollout of this dtype.

    A quantised one is left as it is.
    """
    return tensor.detach() if tensor.dtype in QUANTIZED else tensor.detach().to(pushed_dtype(name, dtype))


def is_scale(name: str) -> bool:
    """Return whether this names the scales of a quantised weight."""
    return name.endswith(SCALE_ENDING)


@torch.no_grad()
def tensor_hash(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the tensor's part of the fingerprint: the sum of its element hashes, as an unbounded integer."""
    if tensor.numel() == 0:
        return 0
    flat = (tensor if tensor.dtype in QUANTIZED else tensor.to(dtype)).detach().reshape(-1)
    if flat.element_size() not in (2, 4) and flat.dtype not in QUANTIZED:
        raise ValueError(
            f"fingerprint works on 2- and 4-byte dtypes and on those of quantised weights, not {flat.dtype}"
        )
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[flat.element_size()])
    if bits.device.type == "cpu":
        return _sum_of_hashes(bits.numpy())
    return int(torch.stack([_hash_bits(chunk.int()).sum(dtype=torch.int64) for chunk in bits.split(CHUNK_CUDA)]).sum())


def _sum_of_hashes(bits: np.ndarray) -> int:
    """Return the sum of the signed hashes of int16 or int32 bit patterns, as `_hash_bits` computes them.

    In numpy, because each torch operation on a chunk would wait for torch's other threads. A wait takes longer than
    the operation, on a busy machine a hundred times.
    """
    size, total = min(len(bits), CHUNK_CPU), 0
    buffers = np.empty((2, size), dtype=np.uint32)
    for start in range(0, len(bits), size):
        chunk = bits[start : start + size]
        mixed, shifted = buffers[:, : len(chunk)]
        np.copyto(mixed.view(np.int32), chunk)
        for multiplier, shift in zip(_MULTIPLIERS, (15, 13), strict=True):
            np.multiply(mixed, np.uint32(multiplier), out=mixed)
            np.right_shift(mixed, shift, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
        total += int(mixed.view(np.int32).sum(dtype=np.int64))
    return total


def _hash_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return a bijective mix of each int32, with 0 -> 0 (multiply and xor-shift, as MurmurHash3's finalizer does)."""
    first, second = (multiplier - (1 << 32) for multiplier in _MULTIPLIERS)
    mixed = bits * first
    mixed ^= (mixed >> 15) & 0x1FFFF  # the mask turns the arithmetic shift into a logical one
    mixed *= second
    mixed ^= (mixed >> 13) & 0x7FFFF
    return mixed
