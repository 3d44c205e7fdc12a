"""Kernels of vLLM that hold a weight in the layout in which it was pushed.

vLLM 0.32 would rearrange some. A rearranged weight could be neither replaced nor read back for its fingerprint. The
rollout calls `use_plain_kernels` before it starts the engine, which is in its process. Imports vLLM.
"""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers import utils as linear_dispatch
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from hybridrl.workers.weight_transfer.quantize import dequantize_blocks


class PlainFp8Kernel(Fp8BlockScaledMMLinearKernel):
    """Computes with fp8 weights and their scales as they were pushed, on any CPU.

    vLLM's own kernel needs a CPU with AMX, and packs the weight. This one multiplies values and scales in every call,
    and activations stay in the rollout's dtype: the numbers are those of `rollout.name=hf`, the speed is not fp8's.
    """

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave values and scales as they are."""

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        return F.linear(x, dequantize_blocks(layer.weight, layer.weight_scale_inv, x.dtype), bias)

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights does not call it")


def use_plain_kernels() -> None:
    """Choose and replace kernels of this process; once is enough."""
    # DeepGEMM, FlashInfer and Marlin round the scales anew or pack the weight.
    for platform, chosen in linear._POSSIBLE_FP8_BLOCK_KERNELS.items():
        chosen[:] = [kernel for kernel in chosen if kernel.__name__ in PLAIN_FP8]
        if platform == PlatformEnum.CPU:
            chosen[:] = [PlainFp8Kernel]
    if current_platform.is_cpu():
        Fp8Config.get_supported_act_dtypes = staticmethod(_any_dtype)  # type: ignore[method-assign]
        linear_dispatch.dispatch_cpu_unquantized_gemm = _use_plain_weight
        RotaryEmbedding.forward_cpu = _rotate  # type: ignore[method-assign, assignment]


PLAIN_FP8 = {"CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"}
"""vLLM's block-wise kernels that keep values (N, K) and float32 scales."""
_rotate_flat = RotaryEmbedding.forward_cpu


def _any_dtype() -> list[torch.dtype]:
    """Return the dtypes of activations with which `PlainFp8Kernel` computes."""
    return [torch.bfloat16, torch.float16, torch.float32]


def _use_plain_weight(layer: Any, remove_weight: bool) -> None:
    """Let a Linear compute with `layer.weight`, which vLLM packs and drops."""
    layer.cpu_linear = F.linear


def _rotate(layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
    """Rotate all heads of a query (T,H,D); vLLM's kernel rotates only the first."""
    rotate = _rotate_flat if query.ndim == 2 else RotaryEmbedding.forward_native
    return rotate(layer, positions, query, key)
