"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): W is frozen, B A is trained.

The layer computes with W + (alpha / rank) B A. An adapted layer is the original layer with two more parameters, so
names, checkpoints and sharding do not change. Exports use `merged_weights`. Rollouts use them too, or they receive the
frozen base once (`base_weights`) and then only `adapter_weights`, a few percent of the bytes. Nothing here is specific
to a model family. The Megatron engine shares the settings and the choice of layers; its layers are in
`megatron/adapters.py`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.peft_format import read_adapter

ALL_LINEAR = "all-linear"
TOWER = "visual."  # before the last names of layers that compute images
PARTS = ("lora_A", "lora_B")

GatherFn = Callable[[torch.Tensor], torch.Tensor]
"""Returns the full tensor of a parameter. It may be collective: all ranks make the same calls in the same order."""


class AdaptedLayer:
    """Marks a layer that got an adapter, of either engine, and computes with it while `enabled`."""

    enabled = True


class LoRALinear(AdaptedLayer, nn.Linear):
    """Linear layer with an adapter: lora_A (r, in) and lora_B (out, r), in the weight's dtype."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return super().forward(input)
        return super().forward(input) + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


@contextlib.contextmanager
def adapters_off(models: Sequence[nn.Module]) -> Iterator[None]:
    """Compute with the base weights of these models, or parts of one, during a block."""
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, AdaptedLayer)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def add_adapters(model: nn.Module, lora: LoRA, *, seed: int) -> None:
    """Freeze the model and add adapters to the chosen linear layers, in place.

    The model's outputs do not change, because B starts at 0. A is drawn from `seed` as nn.Linear draws its weight,
    without using the global generators. On the meta device A is not drawn.

    Args:
        model: The model.
        lora: Rank, scale and layers. With the path of a saved adapter, its layers are adapted, and the outputs are
            those of the saved adapter.
        seed: Seed of A.

    Raises:
        ConfigError: The model has no such target, the rank is higher than that of any of its layers, or the saved
            adapter does not fit the model.
    """
    saved = None if lora.path is None else read_adapter(lora.path)
    chosen, generator = chosen_layers(model, lora, saved), torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in chosen.items():
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        layer.__class__ = LoRALinear
        assert isinstance(layer, LoRALinear)
        layer.lora_A = nn.Parameter(torch.empty(lora.rank, layer.in_features, **like))
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, lora.rank, **like))
        layer.scale = lora.alpha / lora.rank
        if not layer.weight.is_meta:
            draw_A(layer.lora_A, generator)
            if saved is not None:
                layer.lora_A.data.copy_(saved[f"{name}.lora_A"])
                layer.lora_B.data.copy_(saved[f"{name}.lora_B"])


def draw_A(A: torch.Tensor, generator: torch.Generator) -> None:
    """Draw a new A (r, in) as nn.Linear draws its weight, in place.

    The layers of a model are drawn in the order of `chosen_layers`.
    """
    nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)


def chosen_layers(model: nn.Module, lora: LoRA, saved: Mapping[str, torch.Tensor] | None) -> dict[str, nn.Linear]:
    """Return the layers that get adapters, by name, in the model's order.

    Args:
        model: A Hugging Face model, also on the meta device.
        lora: Rank and layers.
        saved: A and B of a saved adapter by the names of `adapter_weights`, without scale; None: none.

    Raises:
        ConfigError: As for `add_adapters`.
    """
    layers = _layers(model, with_head=lora.head)
    chosen = _chosen(layers, lora.target_modules) if saved is None else _saved_layers(layers, saved, lora)
    largest = max(min(layers[name].in_features, layers[name].out_features) for name in chosen)
    if lora.rank > largest:
        raise ConfigError(
            f"model.lora_rank={lora.rank}: no adapted layer has a rank above {largest}, so a higher one only costs "
            f"memory; set {largest} or less, or lora_rank=0 to train all weights"
        )
    return {name: layers[name] for name in chosen}


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


def unscaled_adapter_weights(model: nn.Module, gather: GatherFn) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield {layer}.lora_A and {layer}.lora_B as they are trained.

    The new weight is W + scale B A.
    """
    for name, layer in _adapted(model).items():
        yield f"{name}.lora_A", gather(layer.lora_A.detach())
        yield f"{name}.lora_B", gather(layer.lora_B.detach())


def base_and_adapter_weights(model: nn.Module, gather: GatherFn) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapters first, then all base weights."""
    yield from adapter_weights(model, gather)
    yield from base_weights(model, gather)


WEIGHTS = {
    "merged": merged_weights,
    "base_and_adapters": base_and_adapter_weights,
    "adapters": adapter_weights,
    "unscaled_adapters": unscaled_adapter_weights,
}


def _adapted(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def _layers(model: nn.Module, *, with_head: bool) -> dict[str, nn.Linear]:
    """Return the plain linear layers by name.

    The output head is left out unless it is asked for, because it is often tied to the embedding.
    """
    head = None if with_head else getattr(model, "get_output_embeddings", lambda: None)()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}


def _saved_layers(layers: dict[str, nn.Linear], saved: Mapping[str, torch.Tensor], lora: LoRA) -> list[str]:
    """Return the layers of a saved adapter, in the model's order."""
    names = {name.rpartition(".")[0] for name in saved}
    for name in sorted(names):
        layer, A, B = layers.get(name), saved[f"{name}.lora_A"], saved[f"{name}.lora_B"]
        if layer is None:
            raise ConfigError(
                f"model.lora_adapter_path={lora.path}: adapts {name}, which is no linear layer of this model; is it "
                "the adapter of another model?"
            )
        expected = (lora.rank, layer.in_features), (layer.out_features, lora.rank)
        if (tuple(A.shape), tuple(B.shape)) != expected:
            raise ConfigError(
                f"model.lora_adapter_path={lora.path}: A and B of {name} are {tuple(A.shape)} and {tuple(B.shape)}, "
                f"expected {expected[0]} and {expected[1]}; is it the adapter of another model?"
            )
    return [name for name in layers if name in names]


def _chosen(layers: dict[str, nn.Linear], targets: Sequence[str]) -> list[str]:
    named = {name: _target(name) for name in layers}
    available = sorted(set(named.values()))
    if not available:
        raise ConfigError(
            "actor_rollout_ref.model.lora_rank: this model has no linear layer (nn.Linear) to adapt; set it to 0"
        )
    wildcards = {ALL_LINEAR, TOWER + ALL_LINEAR} if any(map(_is_of_tower, available)) else {ALL_LINEAR}
    unknown = sorted(set(targets) - wildcards - set(available))
    if unknown:
        raise ConfigError(
            f"model.target_modules={unknown}: the model's linear layers are {', '.join(available)}; or use "
            f"{' and '.join(sorted(wildcards))}"
        )
    every = {False: ALL_LINEAR in targets, True: TOWER + ALL_LINEAR in targets}
    return [name for name, target in named.items() if target in targets or every[_is_of_tower(target)]]


def _target(name: str) -> str:
    """Return how `target_modules` names a layer: by its last name, after `visual.` in a vision tower."""
    last = name.rpartition(".")[2]
    return TOWER + last if TOWER.rstrip(".") in name.split(".") else last


def _is_of_tower(target: str) -> bool:
    return target.startswith(TOWER)
