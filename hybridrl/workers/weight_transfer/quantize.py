"""Weights in one byte per value, with a scale for each block.

A sender quantises them, and a rollout computes with them.

The sender quantises a push, so that every rollout gets the same bits, and fingerprints are those of these bits. A
matrix W (N, K) becomes values q and float32 scales s, one for each block of 128 by 128, as in DeepSeek-V3
(arXiv 2412.19437, 3.3) and vLLM's block-wise fp8:

    s_block = max |W_block| / q_max        q = round(W / s)        W' = q s

    fp8   float8 e4m3, q_max 448; rounding is the cast's
    int8  integers, q_max 127         int4  integers, q_max 7, in a byte each

The scales of a weight travel beside it, under its name and `_scale_inv`. A rollout without kernels for q computes
with W' in its own dtype (`Dequantizer`): the numbers are those of such kernels with unquantised activations, the speed
is not.
"""

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hybridrl.errors import ConfigError, NonFiniteError, StaleWeightsError
from hybridrl.workers.weight_transfer import fingerprint

BLOCK = 128
MIN_SCALE = torch.finfo(torch.float32).tiny  # of blocks of zeros, too: 0 / scale is 0, and no scale is denormal
HIGH_PRECISION = re.compile(
    r"(^|\.)(lm_head|embed_out|score|embed_tokens|embed_in|embed_positions|word_embeddings|wte|wpe"  # head, embeddings
    r"|[^.]*norm[^.]*|ln_[^.]*"
    r"|gate|router|shared_expert_gate"  # which experts compute a token
    r"|in_proj_a|in_proj_b|in_proj_ba|conv1d"  # of recurrent layers
    r"|visual|vision_tower|vision_model|multi_modal_projector)(\.|$)"
)
"""Names of tensors that stay in the rollout's dtype, besides those with less than two dimensions.

They are small, or an error in them changes which computation follows.
"""


@dataclass(frozen=True)
class Grid:
    """The values of a quantised weight.

    Attributes:
        dtype: In which they are sent and held.
        largest: The largest one.
    """

    dtype: torch.dtype
    largest: float


GRIDS = {"fp8": Grid(torch.float8_e4m3fn, 448.0), "int8": Grid(torch.int8, 127.0), "int4": Grid(torch.int8, 7.0)}
"""The values of `actor_rollout_ref.rollout.quantization`."""


def quantize_blocks(weight: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the scales of finite matrices.

    They are (..., N, K) and (..., ceil(N / 128), ceil(K / 128)).

    Blocks at the right and lower edge have fewer values.
    """
    blocks = _blocks(weight.float())
    scales = blocks.abs().amax(dim=(-3, -1)).div_(grid.largest).clamp_(min=MIN_SCALE)
    values = blocks.div_(_over_blocks(scales)).clamp_(-grid.largest, grid.largest)
    if not grid.dtype.is_floating_point:
        values.round_()
    return _cut(values.to(grid.dtype), weight.shape), scales


def dequantize_blocks(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the product of values (..., N, K) and the scales of their blocks; computed in float32."""
    return _cut(_blocks(values.float()).mul_(_over_blocks(scales)).to(dtype), values.shape)


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Return a copy (..., rows of blocks, 128, columns of blocks, 128), filled up with zeros."""
    n, k = matrix.shape[-2:]
    filled = F.pad(matrix, (0, -k % BLOCK, 0, -n % BLOCK))
    filled = filled.clone() if filled.data_ptr() == matrix.data_ptr() else filled
    return filled.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))


def _over_blocks(scales: torch.Tensor) -> torch.Tensor:
    return scales[..., :, None, :, None]


def _cut(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return what `_blocks` made of a matrix as one of its shape."""
    return blocks.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]].contiguous()


def is_quantizable(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a weight is pushed in one byte per value."""
    return tensor.is_floating_point() and tensor.ndim >= 2 and HIGH_PRECISION.search(name) is None


@torch.no_grad()
def quantized_weights(weights: Iterable[fingerprint.NamedTensor], grid: Grid) -> Iterator[fingerprint.NamedTensor]:
    """Yield the weights of a push, quantised where `is_quantizable`, each after its scales.

    Raises:
        NonFiniteError: A weight has an infinity or a NaN, for which no scale exists.
    """
    for name, tensor in weights:
        if not is_quantizable(name, tensor):
            yield name, tensor
            continue
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(f"weight {name!r} is not finite and cannot be quantised; lower the learning rate")
        values, scales = quantize_blocks(tensor, grid)
        yield name + fingerprint.SCALE_ENDING, scales
        yield name, values


class Dequantizer:
    """Turns the weights of a push into those that an engine computes with.

    It stands where `AdapterMerger` does, and likewise knows which fingerprint the engine must have after a push.

    Args:
        names: Of the model's weights.
        dtype: The rollout's.
        kept: Names of weights for which the engine has kernels: they stay quantised.
    """

    def __init__(self, names: fingerprint.WeightNames, *, dtype: fingerprint.Dtypes, kept: Set[str] = frozenset()):
        self._names, self._dtype, self._kept, self._total = names, dtype, kept, 0

    def expect_full_push(
        self, weights: Iterable[fingerprint.NamedTensor], *, is_hashed: bool
    ) -> fingerprint.WeightStream:
        """Return the stream of a push, for `merge`.

        Its bits are always hashed, because the engine will not hold them.

        Args:
            weights: All of the model's; those that are quantised have scales.
            is_hashed: Has no effect.
        """
        self._total = 0
        return fingerprint.WeightStream(weights, self._names, dtype=self._dtype)

    def expect_adapters(self, weights: Iterable[fingerprint.NamedTensor]) -> fingerprint.WeightStream:
        """Refuse a push of adapters alone: what the sender quantises is the merged weight."""
        raise ConfigError("actor_rollout_ref.rollout.quantization: adapters cannot be pushed alone; use lora=merged")

    def merge(self, stream: fingerprint.WeightStream) -> Iterator[fingerprint.NamedTensor]:
        """Yield the weights to load into the engine.

        Raises:
            StaleWeightsError: Scales and weights do not belong together.
        """
        waiting: dict[str, torch.Tensor] = {}  # for the other one of a pair
        for name, tensor in stream:
            if fingerprint.is_scale(name) or tensor.dtype in fingerprint.QUANTIZED:
                weight = name.removesuffix(fingerprint.SCALE_ENDING)
                other = weight if fingerprint.is_scale(name) else weight + fingerprint.SCALE_ENDING
                if other not in waiting:
                    waiting[name] = tensor.clone()  # valid only until the next one is requested
                    continue
                pair = (waiting.pop(other), tensor) if fingerprint.is_scale(name) else (tensor, waiting.pop(other))
                if weight in self._kept:
                    yield from self._counted(weight + fingerprint.SCALE_ENDING, pair[1])
                    yield from self._counted(weight, pair[0])
                    continue
                name, tensor = weight, dequantize_blocks(*pair, fingerprint.pushed_dtype(weight, self._dtype))
            yield from self._counted(name, tensor)
        if waiting:
            raise StaleWeightsError(
                f"{', '.join(sorted(waiting)[:3])}: a quantised weight and its scales came one without the other; push "
                "all weights again"
            )

    def _counted(self, name: str, tensor: torch.Tensor) -> Iterator[fingerprint.NamedTensor]:
        self._total += fingerprint.tensor_hash(tensor, fingerprint.pushed_dtype(name, self._dtype))
        yield name, tensor

    def expected_fingerprint(self, stream: fingerprint.WeightStream) -> int:
        """Return the fingerprint that the engine must have after all of `stream` went through `merge`."""
        return self._total % (1 << 64)
