"""Low-rank adapters (LoRA) on megatron-core's tensor-parallel layers.

`workers/engine/lora.py` says what an adapter is and which layers get one; here is how it is sharded. A Megatron layer
may join several Hugging Face layers (queries, keys and values). Each of them has an adapter of its own, so adapters
are the same tensors as under FSDP, and files of peft fit both.

    layer             A (r, in)           B (out, r)          communicated, r numbers per token
    column-parallel   equal on peers      sharded (output)    forward none, backward a sum
    row-parallel      sharded (input)     equal on peers      forward a sum, backward none

With sequence parallelism, a gather and a reduce-scatter over tokens take the place of "none" and "a sum". Each peer
then has the gradient of its own tokens, and Megatron sums the gradients of the tensors that are equal on peers, as it
does for norms.

Shapes: s tokens, b rows, r rank, n Hugging Face layers of one Megatron layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn
from torch.nn import functional as F

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.lora import PARTS, AdaptedLayer, chosen_layers, draw_A
from hybridrl.workers.engine.megatron.architecture import ADAPTABLE, AdaptableLayer
from hybridrl.workers.engine.megatron.hf_weights import gather_full_tensors
from hybridrl.workers.engine.megatron.network import Network


class Adapter(nn.Module):
    """A and B of one Hugging Face layer, or this process's shards of them."""

    def __init__(self, *, rank: int, size_in: int, size_out: int, like: torch.Tensor):
        super().__init__()
        self.lora_A = nn.Parameter(like.new_empty(rank, size_in))
        self.lora_B = nn.Parameter(like.new_zeros(size_out, rank))


class _ShardedAdapters(AdaptedLayer, nn.Module):
    """Common part of the two layers: an ordinary Megatron layer that got `adapters` after it was built.

    Attributes:
        parts: Name of each joined Hugging Face layer -> its output columns on this process.
        groups: The outputs are joined group by group: heads of queries, keys and values; otherwise 1.
    """

    parts: dict[str, int]
    groups: int
    scale: float
    axes: dict[str, int]

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        return (output + self.change(input_), bias) if self.enabled else (output, bias)

    def change(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to the output, (s, b, this process's output columns)."""
        present = [name for name in self.parts if hasattr(self, name)]
        low = self.exchange(F.linear(states, torch.cat([getattr(self, name).lora_A for name in present])))
        changes = {
            name: F.linear(part, getattr(self, name).lora_B)
            for name, part in zip(present, low.chunk(len(present), -1), strict=True)
        }
        joined = [
            changes[name] if name in changes else low.new_zeros(*low.shape[:-1], size)
            for name, size in self.parts.items()
        ]
        if len(joined) == 1:
            return self.scale * joined[0]
        return self.scale * torch.cat([part.unflatten(-1, (self.groups, -1)) for part in joined], -1).flatten(-2)

    def exchange(self, low: torch.Tensor) -> torch.Tensor:
        """Return states A^T of all tokens and inputs that this process's B needs."""
        raise NotImplementedError

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Return the layer's tensors for a checkpoint, with how each is sharded."""
        layer: Any = self
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.axes,
            sharded_offsets,
            tp_group=layer.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class AdaptedColumnLinear(_ShardedAdapters, ColumnParallelLinear):
    """Column-parallel layer with adapters: A is equal on all peers, B is sharded as the weight is."""

    def exchange(self, low: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(low, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(low, group=self.tp_group)


class AdaptedRowLinear(_ShardedAdapters, RowParallelLinear):
    """Row-parallel layer with adapters: A is sharded as the weight is, B is equal on all peers."""

    def exchange(self, low: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(low, group=self.tp_group)


@torch.no_grad()
def add_adapters(
    chunks: list[Network],
    hf_model: nn.Module,
    lora: LoRA,
    *,
    seed: int,
    saved: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Freeze this process's parts of the model and add its shards of the adapters, in place.

    Adapters are those that FSDP would add: the same layers, and the same numbers from the same seed.

    Args:
        chunks: This process's parts, with weights loaded.
        hf_model: The whole Hugging Face model on the meta device, which names the layers.
        lora: Rank, scale and layers.
        seed: Seed of A.
        saved: A and B of a saved adapter, see `lora.add_adapters`.

    Raises:
        ConfigError: As for `lora.add_adapters`, or a chosen layer is none that this engine can adapt.
    """
    chosen, generator = chosen_layers(hf_model, lora, saved), torch.Generator().manual_seed(seed)
    _check_adaptable(chosen, lora)
    for chunk in chunks:
        chunk.requires_grad_(False)
    places = {name: place for chunk in chunks for name, place in _places(chunk)}
    for name, layer in chosen.items():
        A, B = torch.empty(lora.rank, layer.in_features), torch.zeros(layer.out_features, lora.rank)
        draw_A(A, generator)  # also for layers of other stages, so that all layouts get the same numbers
        if saved is not None:
            A, B = saved[f"{name}.lora_A"], saved[f"{name}.lora_B"]
        if name in places:
            _adapt(*places[name], part=name.rpartition(".")[2], A=A, B=B, scale=lora.alpha / lora.rank)


def _check_adaptable(chosen: Mapping[str, nn.Linear], lora: LoRA) -> None:
    known = {f"{layer.hf_parent}.{part}" for layer in ADAPTABLE for part in layer.parts}
    unknown = [name for name in chosen if ".".join(name.split(".")[-2:]) not in known]
    if unknown:
        raise ConfigError(
            f"model.target_modules={list(lora.target_modules)}: strategy=megatron adapts only attention and dense MLP "
            f"layers, not {unknown[0]}; name the others in target_modules, or use strategy=fsdp"
        )


def _places(chunk: Network) -> Iterator[tuple[str, tuple[nn.Module, AdaptableLayer]]]:
    """Yield (Hugging Face name, Megatron layer) of the layers of one part of the model."""
    for block in chunk.decoder.layers:
        modules = dict(block.named_modules())
        for layer in ADAPTABLE:
            for part in layer.parts if layer.name in modules else ():
                name = f"model.layers.{block.layer_number - 1}.{layer.hf_parent}.{part}"
                yield name, (modules[layer.name], layer)


def _adapt(module: Any, layer: AdaptableLayer, *, part: str, A: torch.Tensor, B: torch.Tensor, scale: float) -> None:
    """Add one adapter to a Megatron layer, given A and B in full."""
    config, column = module.config, layer.shard_dim == 0
    if not isinstance(module, _ShardedAdapters):
        module.__class__ = AdaptedColumnLinear if column else AdaptedRowLinear
        module.parts, module.groups = _output_parts(layer, module, config)
        module.scale = scale
        module.axes = {"weight": 0, "bias": 0} if column else {"weight": 1}
    peers, rank = module.tp_group.size(), module.tp_group.rank()
    A, B = (A, B.chunk(peers, 0)[rank]) if column else (A.chunk(peers, 1)[rank], B)
    adapter = Adapter(rank=A.size(0), size_in=A.size(1), size_out=B.size(0), like=module.weight)
    adapter.lora_A.copy_(A)
    adapter.lora_B.copy_(B)
    sharded, equal = (adapter.lora_B, adapter.lora_A) if column else (adapter.lora_A, adapter.lora_B)
    set_tensor_model_parallel_attributes(sharded, True, 0 if column else 1, 1)
    summed: Any = equal
    summed.sequence_parallel = config.sequence_parallel
    module.add_module(part, adapter)
    module.axes[f"{part}.lora_B" if column else f"{part}.lora_A"] = layer.shard_dim


def _output_parts(layer: AdaptableLayer, module: Any, config: TransformerConfig) -> tuple[dict[str, int], int]:
    """Return this process's output columns of each joined Hugging Face layer, and how many groups they have."""
    total = module.weight.size(0)
    if len(layer.parts) < 3:
        return dict.fromkeys(layer.parts, total // len(layer.parts)), 1
    groups = config.num_query_groups // module.tp_group.size()
    size = groups * config.kv_channels
    return dict(zip(layer.parts, (total - 2 * size, size, size), strict=True)), groups


def gather_weights(chunks: list[Network], *, lora: str, scale: float, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors under Hugging Face names as `lora.WEIGHTS` does. Collective.

    Merging holds the adapters of the whole model at once, a few percent of its bytes.

    Args:
        chunks: This process's parts of a causal language model with adapters.
        lora: A name in `lora.WEIGHTS`.
        scale: alpha / rank.
        tied: Whether the head is the embedding.
    """
    if lora == "merged":
        adapters = dict(_gather(chunks, tied=tied, of_adapters=True))
        for name, value in _gather(chunks, tied=tied, of_adapters=False):
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A" in adapters:
                value = torch.addmm(value, adapters[f"{layer}.lora_B"], adapters[f"{layer}.lora_A"], alpha=scale)
            yield name, value
        return
    for name, value in _gather(chunks, tied=tied, of_adapters=True):
        yield name, value * scale if name.endswith("lora_B") and lora != "unscaled_adapters" else value
    if lora == "base_and_adapters":
        yield from _gather(chunks, tied=tied, of_adapters=False)


def _gather(chunks: list[Network], *, tied: bool, of_adapters: bool) -> Iterator[tuple[str, torch.Tensor]]:
    def is_wanted(name: str) -> bool:
        return (name.rpartition(".")[2] in PARTS) == of_adapters

    return gather_full_tensors(chunks, kind="causal_lm", tied=tied, is_wanted=is_wanted)
