"""Weights from and to Hugging Face names, one tensor at a time: no process ever holds a whole model.

Reading: each process opens the safetensors files and takes its part of each tensor it has. Writing: tensor-parallel
peers put a tensor together, and its pipeline stage sends it to the others.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.workers.engine.megatron.architecture import Recipe, recipe_of
from hybridrl.workers.engine.megatron.network import Network

logger = logging.getLogger(__name__)

NEW_HEAD = ("score.weight", "score.bias")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)")
_EXPERT = re.compile(r"(local_experts\.)(\d+)")


class HFTensors:
    """The tensors of a Hugging Face model on disk, by name; nothing is read before it is asked for."""

    def __init__(self, path: str):
        self.path = path
        self._file_of = _files(path)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor, on the CPU, as it is stored. Raises CheckpointError if there is none."""
        from safetensors import safe_open

        if name not in self._file_of:
            raise CheckpointError(f"{self.path} lacks {name}; it is another kind of model, or damaged")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_tensor(name)


def _files(path: str) -> dict[str, str]:
    """Return {tensor name: file} of a local directory or a model on the hub."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if index := cached_file(path, "model.safetensors.index.json", **optional):
        with open(index) as f:
            found = json.load(f)["weight_map"]
        files = {name: cached_file(path, name) for name in set(found.values())}
        return {name: files[file] for name, file in found.items()}
    single = cached_file(path, "model.safetensors", **optional)
    if single is None:
        raise CheckpointError(
            f"{path} has no *.safetensors, which strategy=megatron reads; save the model as safetensors, or use fsdp"
        )
    with safe_open(single, framework="pt") as f:
        return dict.fromkeys(f.keys(), os.path.abspath(single))


@torch.no_grad()
def read_weights(chunks: list[Network], tensors: HFTensors, *, kind: str, tied: bool, seed: int) -> None:
    """Fill this process's parts of the model.

    A value head that the checkpoint lacks is drawn with `seed`, equal on all ranks.
    """
    peers, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for name, parameter in named(chunk):
            recipe = recipe_of(name, kind)
            names = ("model.embed_tokens.weight",) if tied and recipe.parts == ("lm_head.weight",) else recipe.parts
            if kind == "value" and names[0] in NEW_HEAD and names[0] not in tensors:
                _draw_head(names[0], parameter, deviation=chunk.init_std, seed=seed)
                continue
            parts = [tensors[part] for part in names]
            if recipe.kind == "vocabulary" and len(parts[0]) != chunk.vocab:  # padding could hide it
                raise ConfigError(
                    f"vocab_size={chunk.vocab}: {names[0]} has {len(parts[0])} rows in the model's files; "
                    "leave vocab_size out of "
                    "actor_rollout_ref.model.override_config, and see that config.json has the number of the files"
                )
            whole = _join(parts, recipe, chunk.config, peers)
            parameter.copy_(whole if recipe.cut is None else whole.chunk(peers, recipe.cut)[rank])


def _draw_head(name: str, parameter: torch.Tensor, *, deviation: float, seed: int) -> None:
    logger.info("The checkpoint has no %s; it is new, drawn with seed %d.", name, seed)
    if name.endswith("bias"):
        parameter.zero_()
        return
    drawn = torch.empty(parameter.shape).normal_(0.0, deviation, generator=torch.Generator().manual_seed(seed))
    parameter.copy_(drawn)


@torch.no_grad()
def whole_tensors(
    chunks: list[Network],
    *,
    kind: str,
    tied: bool,
    of: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.data,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor) of all parameters, on every rank. Collective: all ranks exhaust it
    together.

    of: what of a parameter is meant, a tensor of its shape; its gradient, for instance.
    """
    peers = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    config = chunks[0].config
    mine = {
        name: parameter
        for chunk in chunks
        for name, parameter in named(chunk)
        if not (tied and name == "output_layer.weight")
    }
    table = [(name, tuple(parameter.shape), of(parameter).dtype) for name, parameter in mine.items()]
    tables: list = [table] * stages
    if stages > 1:
        dist.all_gather_object(tables, table, group=parallel_state.get_pipeline_model_parallel_group())
    for stage, entries in enumerate(tables):
        for name, shape, dtype in entries:
            tensor = of(mine[name]) if stage == parallel_state.get_pipeline_model_parallel_rank() else None
            for recipe, whole in _gathered(
                name, tensor, shape, dtype, kind=kind, peers=peers, stage=stage, chunk=chunks[0]
            ):
                yield from zip(recipe.parts, _split(whole, recipe, config, peers, chunks[0].vocab), strict=True)


def _gathered(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple,
    dtype: torch.dtype,
    *,
    kind: str,
    peers: int,
    stage: int,
    chunk: Network,
) -> Iterator[tuple[Recipe, torch.Tensor]]:
    """Yield a whole Megatron tensor and its recipe; of an expert, those of all expert-parallel peers, which have others
    in its place.
    """
    device = next(chunk.parameters()).device
    recipe = recipe_of(name, kind)
    if recipe.cut is not None and peers > 1:
        size = tuple(n * peers if dim == recipe.cut else n for dim, n in enumerate(shape))
        whole = (
            None
            if tensor is None
            else _all_gather(tensor, parallel_state.get_tensor_model_parallel_group(), recipe.cut)
        )
    else:
        size, whole = shape, tensor
    whole = _from_stage(whole, size, dtype, stage, device)
    experts = parallel_state.get_expert_model_parallel_group()
    if "local_experts" not in name or experts.size() == 1:
        yield recipe, whole
        return
    number = int(_EXPERT.search(name)[2])
    per_rank = chunk.config.num_moe_experts // experts.size()
    everyone = [torch.empty_like(whole) for _ in range(experts.size())]
    dist.all_gather(everyone, whole.contiguous(), group=experts)
    for rank, other in enumerate(everyone):
        theirs = _EXPERT.sub(lambda found, n=rank * per_rank + number % per_rank: f"{found[1]}{n}", name)
        yield recipe_of(theirs, kind), other


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def _from_stage(
    whole: torch.Tensor | None, size: tuple, dtype: torch.dtype, stage: int, device: torch.device
) -> torch.Tensor:
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return whole
    whole = torch.empty(size, dtype=dtype, device=device) if whole is None else whole.contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(group, stage), group=group)
    return whole


def named(chunk: Network) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (Megatron name, parameter), layer and expert numbers counting over the whole model."""
    layers = chunk.decoder.layers
    first = layers[0].layer_number - 1 if len(layers) else 0
    expert = 0
    if chunk.config.num_moe_experts:
        group = parallel_state.get_expert_model_parallel_group()
        expert = group.rank() * (chunk.config.num_moe_experts // group.size())
    for name, parameter in chunk.named_parameters():
        name = _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + first}", name)
        yield _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + expert}", name), parameter


def _join(parts: list[torch.Tensor], recipe: Recipe, config: TransformerConfig, peers: int) -> torch.Tensor:
    """Hugging Face tensors -> the whole Megatron tensor, ordered so that `chunk(peers)` gives each rank's part, if it
    is cut.
    """
    kind = recipe.kind
    if kind == "qkv":  # of each group of heads: its queries, its key, its value
        return torch.cat([part.unflatten(0, (config.num_query_groups, -1)) for part in parts], 1).flatten(0, 1)
    if kind == "glu" and recipe.cut is not None:  # of each rank: gate, then up
        return torch.cat([piece for pair in zip(*(part.chunk(peers) for part in parts), strict=True) for piece in pair])
    if kind == "vocabulary":
        return torch.nn.functional.pad(parts[0], (0, 0, 0, -parts[0].size(0) % peers))
    return torch.cat(parts)


def _split(
    whole: torch.Tensor, recipe: Recipe, config: TransformerConfig, peers: int, vocab: int
) -> list[torch.Tensor]:
    """What `_join` joined."""
    kind = recipe.kind
    if kind == "qkv":
        d, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
        groups = whole.unflatten(0, (config.num_query_groups, -1))
        return [part.flatten(0, 1) for part in groups.split([queries * d, d, d], 1)]
    if kind == "glu":
        halves = [part.chunk(2) for part in whole.chunk(1 if recipe.cut is None else peers)]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]
    return [whole[:vocab] if kind == "vocabulary" else whole]
