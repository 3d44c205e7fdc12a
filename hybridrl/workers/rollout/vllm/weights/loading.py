"""Loads pushed weights into a vLLM model, also where vLLM has another layout.

vLLM arranges the weights of experts for its kernel after it has loaded a checkpoint: on the CPU in blocks, on CUDA as
FlashInfer wants them. A plain copy over them would leave the checkpoint's layout there. The fingerprint, a sum, does
not see it, and the engine would generate other tokens. vLLM's layerwise reload collects the weights of such a layer,
arranges them as at the start, and copies the result into the layer's own tensors.

On CUDA layers in fp8 are reloaded so, too: vLLM replaces their parameters by ones that a loader cannot write to.

Of latent attention (DeepSeek-V3) vLLM keeps two matrices that it computes from a pushed one. They are computed again.

All other layers keep the checkpoint's layout, and their weights are copied in place. That needs no second copy, and it
allows the partial pushes of adapters, for which a reload would leave the rest of a fused layer undefined.

Imported inside vLLM's worker, by `worker_extension`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.platforms import current_platform

from hybridrl.workers.weight_transfer.fingerprint import Dtypes, NamedTensor, fingerprint

REBUILT = (UnquantizedFusedMoEMethod,) if current_platform.is_cpu() else (UnquantizedFusedMoEMethod, Fp8LinearMethod)
"""Methods of layers whose parameters a loader cannot write to after the start."""
DERIVED = {"W_UV", "W_UK_T"}
"""Parameters of latent attention that vLLM computes from `kv_b_proj.weight`."""
DECAY = ".A"
"""Ending of Mamba's parameters -exp(A_log), which vLLM holds in place of `A_log`."""


@torch.no_grad()
def load_weights(model: Any, weights: Iterable[NamedTensor], *, config: VllmConfig) -> None:
    """Load named weights (Hugging Face names); the tensors of `model` keep their addresses.

    With experts it needs memory for the largest layer's experts twice.

    Args:
        model: vLLM's model.
        weights: all of the model's, or some; each is valid only until the next one is requested.
        config: the engine's.
    """
    layers = [*model.modules()]
    rebuilt = [layer for layer in layers if isinstance(_method(layer), REBUILT)]
    if isinstance(model, (DeepseekV2ForCausalLM, GptOssForCausalLM)):
        weights = _one_by_one(weights, keeps_names=isinstance(model, GptOssForCausalLM))
    try:
        _load_rebuilt(model, weights, rebuilt, config) if rebuilt else model.load_weights(weights)
    finally:
        for layer in layers:
            if isinstance(layer, MLAAttention):
                layer.process_weights_after_loading(cast(torch.dtype, config.model_config.dtype))  # computes DERIVED


class PushedDecays:
    """The decays `A_log` of Mamba's layers as they were pushed.

    A fingerprint of what vLLM holds instead, -exp(A_log), would not be that of the push.
    """

    def __init__(self) -> None:
        self._pushed: dict[str, torch.Tensor] = {}

    def noted(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the weights and keep the decays among them."""
        for name, tensor in weights:
            if name.endswith(".A_log"):
                self._pushed[name] = tensor.clone()
            yield name, tensor

    def fingerprint(self, held: int, dtype: Dtypes) -> int:
        """Return the fingerprint of the pushed decays if vLLM holds what they make.

        Else return `held`, that of its own.
        """
        made = [(name, -decay.float().exp()) for name, decay in self._pushed.items()]
        return fingerprint([*self._pushed.items()], dtype) if fingerprint(made, torch.float32) == held else held


def pushed_parameters(parameters: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield vLLM's parameters without those that vLLM derives from others."""
    return ((name, parameter) for name, parameter in parameters if name.rpartition(".")[2] not in DERIVED)


def _load_rebuilt(
    model: Any, weights: Iterable[NamedTensor], rebuilt: list[torch.nn.Module], config: VllmConfig
) -> None:
    with set_current_vllm_config(config), _rebuilt_kernels(rebuilt):
        for layer in rebuilt:
            initialize_layerwise_reload(layer)
        try:
            model.load_weights((name, tensor.clone()) for name, tensor in weights)  # vLLM keeps them for a while
        finally:  # also after a failed push: the next one must not find half-collected layers
            for layer in rebuilt:
                finalize_layerwise_reload(layer, config.model_config)


def _one_by_one(weights: Iterable[NamedTensor], *, keeps_names: bool) -> Iterator[NamedTensor]:
    """Yield weights, those of experts (E, ...) one expert at a time.

    DeepSeek's loader knows no others. That of gpt-oss would copy the whole ones past the layerwise reload, which would
    drop them.

    Args:
        weights: Hugging Face names.
        keeps_names: As gpt-oss. Otherwise gate and up are apart, under the names of checkpoints.
    """
    for name, tensor in weights:
        layer, _, own = name.rpartition(".experts.")
        if own.removesuffix("_bias") not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            if keeps_names:
                parts = {own: expert}
            elif own == "gate_up_proj":
                gate, up = expert.chunk(2)
                parts = {"gate_proj.weight": gate, "up_proj.weight": up}
            else:
                parts = {f"{own}.weight": expert}
            for part, matrix in parts.items():
                yield f"{layer}.experts.{number}.{part}", matrix


@contextmanager
def _rebuilt_kernels(rebuilt: list[torch.nn.Module]) -> Iterator[None]:
    """Make vLLM arrange the reloaded experts anew on the CPU.

    vLLM 0.32 does that there only while it builds the kernel. Layers that are not reloaded keep theirs.
    """
    methods = [_method(layer) for layer in rebuilt] if current_platform.is_cpu() else []
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
