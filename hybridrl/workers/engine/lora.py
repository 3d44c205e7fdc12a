"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): W stays as it is, B A is learned, the layer computes with W +
(alpha / rank) B A.

An adapted layer is the layer that was there, with two more parameters: names, checkpoints and sharding stay what they
are. Exports get `merged_weights`; rollouts get them, too, or the frozen base once (`base_weights`) and then only
`adapter_weights`, which are a few percent of the bytes. Nothing here is specific to a model family or to FSDP.
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

Whole = Callable[[torch.Tensor], torch.Tensor]
"""Returns a parameter whole; it may be a collective of all ranks, who make the same calls in the same order."""


@dataclass(frozen=True)
class LoRA:
    """rank: of the learned change, r.

    alpha: its scale is alpha / r. target_modules: last names of layers, or "all-linear".
    """

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
    """Freeze the model and give the chosen linear layers adapters, in place; it computes what it did, because B starts
    at 0.

    A is drawn from `seed` as nn.Linear draws its weight, and without touching the global generators; on the meta device
    it is not drawn. Raises ConfigError for a target that the model does not have.
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


def merged_weights(model: nn.Module, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the model saves, under the names it had before `add_adapters`, with the adapters' changes in the
    weights.
    """
    adapted = {f"{name}.weight": layer for name, layer in _adapted(model).items()}
    for name, value in base_weights(model, whole):
        if layer := adapted.get(name):
            value = torch.addmm(value, whole(layer.lora_B.detach()), whole(layer.lora_A.detach()), alpha=layer.scale)
        yield name, value


def base_weights(model: nn.Module, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the model saves, under the names it had before `add_adapters`, without the adapters' changes."""
    saved = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and name.rpartition(".")[2] not in PARTS:
            yield name, whole(tensor.detach())


def adapter_weights(model: nn.Module, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield {layer}.lora_A (r, in) and {layer}.lora_B (out, r) of every adapted layer; the scale is in B, so W + B A is
    the new weight.
    """
    for name, layer in _adapted(model).items():
        yield f"{name}.lora_A", whole(layer.lora_A.detach())
        yield f"{name}.lora_B", whole(layer.lora_B.detach()) * layer.scale


def apart_weights(model: nn.Module, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapters, then the weights that they change and all others."""
    yield from adapter_weights(model, whole)
    yield from base_weights(model, whole)


WEIGHTS = {"merged": merged_weights, "apart": apart_weights, "adapters": adapter_weights}


def _adapted(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def _layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the plain linear layers by name, without the output head: it is often the embedding's twin."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _chosen(layers: dict[str, nn.Linear], targets: Sequence[str]) -> list[str]:
    known = sorted({name.rpartition(".")[2] for name in layers})
    if not known:
        raise ConfigError(
            "actor_rollout_ref.model.lora_rank: this model has no linear layers (nn.Linear) that could "
            "take an adapter; use 0"
        )
    unknown = sorted(set(targets) - {ALL_LINEAR} - set(known))
    if unknown:
        raise ConfigError(
            f"model.target_modules={unknown}: the model's linear layers are {', '.join(known)}; or use {ALL_LINEAR}"
        )
    return [name for name in layers if ALL_LINEAR in targets or name.rpartition(".")[2] in targets]
