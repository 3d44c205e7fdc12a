"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): W is frozen, B A is trained.

The layer computes with W + (alpha / rank) B A. An adapted layer is the original layer with two more parameters, so
names, checkpoints and sharding do not change. Exports use `merged_weights`. Rollouts use them too, or they receive the
frozen base once (`base_weights`) and then only `adapter_weights`, a few percent of the bytes. Nothing here is specific
to a model family or to FSDP.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hybridrl.errors import ConfigError

ALL_LINEAR = "all-linear"
PARTS = ("lora_A", "lora_B")

GatherFn = Callable[[torch.Tensor], torch.Tensor]
"""Returns the full tensor of a parameter. It may be collective: all ranks make the same calls in the same order."""


@dataclass(frozen=True)
class LoRA:
    """Settings of the adapters.

    Attributes:
        rank: Rank r of the trained change.
        alpha: The change is scaled by alpha / r.
        target_modules: Last name components of the adapted layers, or "all-linear".
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = (ALL_LINEAR,)


class LoRALinear(nn.Linear):
    """Linear layer with an adapter: lora_A (r, in) and lora_B (out, r), in the weight's dtype."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


def add_adapters(model: nn.Module, lora: LoRA, *, seed: int) -> None:
    """Freeze the model and add adapters to the chosen linear layers, in place.

    The model's outputs do not change, because B starts at 0. A is drawn from `seed` as nn.Linear draws its weight,
    without using the global generators. On the meta device A is not drawn.

    Raises:
        ConfigError: The model has no such target.
    """
    layers = _layers(model)
    chosen = _chosen(layers, lora.target_modules)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in chosen:
        layer = layers[name]
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        layer.__class__ = LoRALinear
        assert isinstance(layer, LoRALinear)
        layer.lora_A = nn.Parameter(torch.empty(lora.rank, layer.in_features, **like))
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, lora.rank, **like))
        layer.scale = lora.alpha / lora.rank
        if not layer.weight.is_meta:
            nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5), generator=generator)


def merged_weights(model: nn.Module, gather: GatherFn) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's saved tensors under their original names, with the adapters merged in."""
    adapted = {f"{name}.weight": layer for name, layer in _adapted(model).items()}
    for name, value in base_weights(model, gather):
        if layer := adapted.get(name):
            value = torch.addmm(value, gather(layer.lora_B.detach()), gather(layer.lora_A.detach()), alpha=layer.scale)
        yield name, value


def base_weights(model: nn.Module, gather: GatherFn) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's saved tensors under their original names, without the adapters."""
    saved = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and name.rpartition(".")[2] not in PARTS:
            yield name, gather(tensor.detach())


def adapter_weights(model: nn.Module, gather: GatherFn) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield {layer}.lora_A (r, in) and {layer}.lora_B (out, r) of every adapted layer.

    The scale is in B, so W + B A is the new weight.
    """
    for name, layer in _adapted(model).items():
        yield f"{name}.lora_A", gather(layer.lora_A.detach())
        yield f"{name}.lora_B", gather(layer.lora_B.detach()) * layer.scale


def base_and_adapter_weights(model: nn.Module, gather: GatherFn) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapters first, then all base weights."""
    yield from adapter_weights(model, gather)
    yield from base_weights(model, gather)


WEIGHTS = {"merged": merged_weights, "base_and_adapters": base_and_adapter_weights, "adapters": adapter_weights}


def _adapted(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def _layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the plain linear layers by name.

    The output head is left out, because it is often tied to the embedding.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _chosen(layers: dict[str, nn.Linear], targets: Sequence[str]) -> list[str]:
    available = sorted({name.rpartition(".")[2] for name in layers})
    if not available:
        raise ConfigError(
            "actor_rollout_ref.model.lora_rank: this model has no linear layer (nn.Linear) to adapt; set it to 0"
        )
    unknown = sorted(set(targets) - {ALL_LINEAR} - set(available))
    if unknown:
        raise ConfigError(
            f"model.target_modules={unknown}: the model's linear layers are {', '.join(available)}; or use {ALL_LINEAR}"
        )
    return [name for name in layers if ALL_LINEAR in targets or name.rpartition(".")[2] in targets]
