"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): W stays as it is, B A is learned, the layer computes with W + (alpha / rank) B A.

An adapted layer is the layer that was there, with two more parameters: names, checkpoints and sharding stay what they are. Adapters are
never seen outside the engine: `merged_weights` are what rollouts and exports get. Nothing here is specific to a model family or to FSDP.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from hybridrl.errors import ConfigError

ALL_LINEAR = "all-linear"
PARTS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class LoRA:
    """rank: of the learned change, r. alpha: its scale is alpha / r. target_modules: last names of layers, or "all-linear"."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = (ALL_LINEAR,)


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: lora_A (r, in), lora_B (out, r), both float like the weight."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's own name
        return super().forward(input) + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


def add_adapters(model: nn.Module, lora: LoRA, *, seed: int) -> None:
    """Freeze the model and give the chosen linear layers adapters, in place; it computes what it did, because B starts at 0.

    A is drawn from `seed` as nn.Linear draws its weight, and without touching the global generators; on the meta device it is not drawn.
    Raises ConfigError for a target that the model does not have.
    """
    layers = _layers(model)
    chosen = _chosen(layers, lora.target_modules)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in chosen:
        layer = layers[name]
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        layer.__class__ = LoRALinear
        layer.lora_A = nn.Parameter(torch.empty(lora.rank, layer.in_features, **like))
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, lora.rank, **like))
        layer.scale = lora.alpha / lora.rank
        if not layer.weight.is_meta:
            nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5), generator=generator)


def merged_weights(model: nn.Module, whole: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the model saves, under the names it had before `add_adapters`, with the adapters' changes in the weights.

    whole: returns a parameter whole; it may be a collective of all ranks, who make the same calls in the same order.
    """
    adapted = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    saved = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in saved or name.rpartition(".")[2] in PARTS:
            continue
        value = whole(tensor.detach())
        if layer := adapted.get(name):
            value = torch.addmm(value, whole(layer.lora_B.detach()), whole(layer.lora_A.detach()), alpha=layer.scale)
        yield name, value


def _layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the plain linear layers by name, without the output head: it is often the embedding's twin."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _chosen(layers: dict[str, nn.Linear], targets: Sequence[str]) -> list[str]:
    known = sorted({name.rpartition(".")[2] for name in layers})
    if not known:
        raise ConfigError(
            "actor_rollout_ref.model.lora_rank: this model has no linear layers (nn.Linear) that could take an adapter; use 0"
        )
    unknown = sorted(set(targets) - {ALL_LINEAR} - set(known))
    if unknown:
        raise ConfigError(f"model.target_modules={unknown}: the model's linear layers are {', '.join(known)}; or use {ALL_LINEAR}")
    return [name for name in layers if ALL_LINEAR in targets or name.rpartition(".")[2] in targets]
