"""Loads pushed weights into a vLLM model, also into experts, whose weights vLLM stores in the layout of a kernel.

vLLM arranges the weights of experts for its kernel after it has loaded a checkpoint: on the CPU in blocks, on CUDA as
FlashInfer wants them. A plain copy over them would leave the checkpoint's layout there. The fingerprint, a sum, does
not see it, and the engine would generate other tokens. vLLM's layerwise reload collects the weights of such a layer,
arranges them as at the start, and copies the result into the layer's own tensors.

All other layers keep the checkpoint's layout, and their weights are copied in place. That needs no second copy, and it
allows the partial pushes of adapters, for which a reload would leave the rest of a fused layer undefined.

Imported inside vLLM's worker, by `worker_extension`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from hybridrl.workers.weight_transfer.fingerprint import NamedTensor


@torch.no_grad()
def load_weights(model: Any, weights: Iterable[NamedTensor], *, config: VllmConfig) -> None:
    """Load named weights (Hugging Face names); the tensors of `model` keep their addresses.

    With experts it needs memory for the largest layer's experts twice.

    Args:
        model: vLLM's model.
        weights: all of the model's, or some; each is valid only until the next one is requested.
        config: the engine's.
    """
    experts = [layer for layer in model.modules() if isinstance(_method(layer), UnquantizedFusedMoEMethod)]
    if not experts:
        model.load_weights(weights)
        return
    with set_current_vllm_config(config), _rebuilt_kernels(experts):
        for layer in experts:
            initialize_layerwise_reload(layer)
        try:
            model.load_weights((name, tensor.clone()) for name, tensor in weights)  # vLLM keeps them for a while
        finally:  # also after a failed push: the next one must not find half-collected layers
            for layer in experts:
                finalize_layerwise_reload(layer, config.model_config)


@contextmanager
def _rebuilt_kernels(experts: list[torch.nn.Module]) -> Iterator[None]:
    """Make vLLM arrange the reloaded experts anew on the CPU.

    vLLM 0.32 does that there only while it builds the kernel. Layers that are not reloaded keep theirs.
    """
    methods = [_method(layer) for layer in experts] if current_platform.is_cpu() else []
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _method(layer: torch.nn.Module) -> Any:
    """Return vLLM's method of computing with this layer; None if it has none."""
    return getattr(layer, "quant_method", None)
