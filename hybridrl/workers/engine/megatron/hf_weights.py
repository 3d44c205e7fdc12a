"""Load and export weights under Hugging Face names, one tensor at a time.

No process holds a full model. Names are those of files, where every expert has its own tensors; `fuse_experts` makes
the ones of transformers' models. Reading: each process opens the safetensors files and takes its shard of each of its
tensors. Writing: tensor-parallel peers gather a tensor, and its pipeline stage broadcasts it to the other stages.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.workers.engine.megatron.architecture import TensorMapping, mapping_for
from hybridrl.workers.engine.megatron.network import Network

logger = logging.getLogger(__name__)

NEW_HEAD = ("score.weight", "score.bias")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)")
_EXPERT = re.compile(r"(local_experts\.)(\d+)")
_HF_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


class HFCheckpointReader:
    """Tensors of a Hugging Face model on disk, by name, read lazily."""

    def __init__(self, path: str):
        self.path = path
        self._file_of = _files(path)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in its stored dtype.

        Raises:
            CheckpointError: The checkpoint has no such tensor.
        """
        from safetensors import safe_open

        if name not in self._file_of:
            raise CheckpointError(
                f"{self.path} lacks the tensor {name}; check that it is the right kind of model and complete"
            )
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
        files: dict[str, Any] = {name: cached_file(path, name) for name in set(found.values())}
        return {name: files[file] for name, file in found.items()}
    single = cached_file(path, "model.safetensors", **optional)
    if single is None:
        raise CheckpointError(
            f"{path} has no *.safetensors, which strategy=megatron needs; save the model as safetensors, or use fsdp"
        )
    with safe_open(single, framework="pt") as f:
        return dict.fromkeys(f.keys(), os.path.abspath(single))


@torch.no_grad()
def read_weights(
    chunks: list[Network], tensors: HFCheckpointReader, *, kind: str, tied: bool, seed: int, new_head: bool = False
) -> None:
    """Load this process's parts of the model.

    With `new_head`, a head for values or scores that the checkpoint lacks is drawn from `seed`, equal on all ranks.
    """
    for chunk in chunks:
        for name, parameter in named_megatron_parameters(chunk):
            first = mapping_for(name, kind).hf_names[0]
            if new_head and first in NEW_HEAD and first not in tensors:
                _init_head(first, parameter, deviation=chunk.init_std, seed=seed)
            else:
                parameter.copy_(shard_of(name, chunk, tensors, kind=kind, tied=tied))


def shard_of(
    name: str, chunk: Network, tensors: HFCheckpointReader | Mapping[str, torch.Tensor], *, kind: str, tied: bool
) -> torch.Tensor:
    """Return this process's part of the tensor that Megatron calls `name`; memory may be shared."""
    peers, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    mapping = mapping_for(name, kind)
    names = ("model.embed_tokens.weight",) if tied and mapping.hf_names == ("lm_head.weight",) else mapping.hf_names
    parts = [tensors[part] for part in names]
    if mapping.kind == "vocabulary" and len(parts[0]) != chunk.vocab:  # padding could hide the difference
        raise ConfigError(
            f"vocab_size={chunk.vocab}: {names[0]} has {len(parts[0])} rows in the model's files; remove "
            "vocab_size from actor_rollout_ref.model.override_config, and correct it in config.json"
        )
    whole = _merge(parts, mapping, chunk.config, peers)
    return whole if mapping.shard_dim is None else whole.chunk(peers, mapping.shard_dim)[rank]


def _init_head(name: str, parameter: torch.Tensor, *, deviation: float, seed: int) -> None:
    logger.info("The checkpoint has no %s: created it with seed %d.", name, seed)
    if name.endswith("bias"):
        parameter.zero_()
        return
    drawn = torch.empty(parameter.shape).normal_(0.0, deviation, generator=torch.Generator().manual_seed(seed))
    parameter.copy_(drawn)


@torch.no_grad()
def gather_full_tensors(
    chunks: list[Network],
    *,
    kind: str,
    tied: bool,
    value_of: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.data,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, full tensor) of all parameters, on every rank.

    Collective: all ranks exhaust the iterator together.

    Args:
        value_of: Maps a parameter to the exported tensor of the same shape, for instance its gradient.
        is_wanted: Of which Megatron names. Every rank passes the same function.
    """
    peers = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    config = chunks[0].config
    own = {
        name: parameter
        for chunk in chunks
        for name, parameter in named_megatron_parameters(chunk)
        if is_wanted(name) and not (tied and name == "output_layer.weight")
    }
    table = [(name, tuple(parameter.shape), value_of(parameter).dtype) for name, parameter in own.items()]
    tables: list = [table] * stages
    if stages > 1:
        dist.all_gather_object(tables, table, group=parallel_state.get_pipeline_model_parallel_group())
    for stage, entries in enumerate(tables):
        for name, shape, dtype in entries:
            tensor = value_of(own[name]) if stage == parallel_state.get_pipeline_model_parallel_rank() else None
            for mapping, whole in _gather_tensor(
                name, tensor, shape, dtype, kind=kind, peers=peers, stage=stage, chunk=chunks[0]
            ):
                yield from zip(mapping.hf_names, _split(whole, mapping, config, peers, chunks[0].vocab), strict=True)


def fuse_experts(
    weights: Iterable[tuple[str, torch.Tensor]], num_experts: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights with the experts of a layer in two tensors, as transformers' models have them.

    These are `gate_up_proj` and `down_proj`, (expert, output, input). Holds the experts of one layer.

    Args:
        weights: Under the names of files; an expert's gate comes before its up.
        num_experts: Of a layer.
    """
    waiting: dict[str, dict[int, list[torch.Tensor]]] = {}
    for name, tensor in weights:
        if (found := _HF_EXPERT.fullmatch(name)) is None:
            yield name, tensor
            continue
        layer, number, part = found.groups()
        fused = layer + ("down_proj" if part == "down" else "gate_up_proj")
        experts = waiting.setdefault(fused, {})
        experts.setdefault(int(number), []).append(tensor)
        if part != "gate" and len(experts) == num_experts:
            in_order = [one for _, own in sorted(waiting.pop(fused).items()) for one in own]
            yield fused, torch.cat(in_order).unflatten(0, (num_experts, -1))


def _gather_tensor(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple,
    dtype: torch.dtype,
    *,
    kind: str,
    peers: int,
    stage: int,
    chunk: Network,
) -> Iterator[tuple[TensorMapping, torch.Tensor]]:
    """Yield a full Megatron tensor and its mapping.

    For an expert, yield one of every expert-parallel peer.
    """
    device = next(chunk.parameters()).device
    mapping = mapping_for(name, kind)
    if mapping.shard_dim is not None and peers > 1:
        size = tuple(n * peers if dim == mapping.shard_dim else n for dim, n in enumerate(shape))
        whole = (
            None
            if tensor is None
            else _all_gather(tensor, parallel_state.get_tensor_model_parallel_group(), mapping.shard_dim)
        )
    else:
        size, whole = shape, tensor
    whole = _broadcast_from_stage(whole, size, dtype, stage, device)
    experts = parallel_state.get_expert_model_parallel_group()
    if "local_experts" not in name or experts.size() == 1:
        yield mapping, whole
        return
    found = _EXPERT.search(name)
    assert found is not None, "the name has local_experts"
    number = int(found[2])
    per_rank = chunk.config.num_moe_experts // experts.size()
    experts_of_ranks = [torch.empty_like(whole) for _ in range(experts.size())]
    dist.all_gather(experts_of_ranks, whole.contiguous(), group=experts)
    for rank, other in enumerate(experts_of_ranks):
        other_name = _EXPERT.sub(rf"\g<1>{rank * per_rank + number % per_rank}", name)
        yield mapping_for(other_name, kind), other


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def _broadcast_from_stage(
    whole: torch.Tensor | None, size: tuple, dtype: torch.dtype, stage: int, device: torch.device
) -> torch.Tensor:
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        assert whole is not None, "the only stage has every tensor"
        return whole
    whole = torch.empty(size, dtype=dtype, device=device) if whole is None else whole.contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(group, stage), group=group)
    return whole


def named_megatron_parameters(chunk: Network) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (Megatron name, parameter), with layer and expert numbers of the whole model."""
    layers = chunk.decoder.layers
    first = layers[0].layer_number - 1 if len(layers) else 0
    expert = 0
    if chunk.config.num_moe_experts:
        group = parallel_state.get_expert_model_parallel_group()
        expert = group.rank() * (chunk.config.num_moe_experts // group.size())
    for name, parameter in chunk.named_parameters():
        name = _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + first}", name)
        yield _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + expert}", name), parameter


def _merge(parts: list[torch.Tensor], mapping: TensorMapping, config: TransformerConfig, peers: int) -> torch.Tensor:
    """Return the full Megatron tensor of some Hugging Face tensors.

    A sharded tensor is ordered so that `chunk(peers)` gives each rank's shard.
    """
    kind = mapping.kind
    if kind == "qkv":  # per group of heads: queries, key, value
        return torch.cat([part.unflatten(0, (config.num_query_groups, -1)) for part in parts], 1).flatten(0, 1)
    if kind == "glu" and mapping.shard_dim is not None:  # per rank: gate, then up
        return torch.cat([shard for pair in zip(*(part.chunk(peers) for part in parts), strict=True) for shard in pair])
    if kind == "vocabulary":
        return torch.nn.functional.pad(parts[0], (0, 0, 0, -parts[0].size(0) % peers))
    return torch.cat(parts)


def _split(
    whole: torch.Tensor, mapping: TensorMapping, config: TransformerConfig, peers: int, vocab: int
) -> list[torch.Tensor]:
    """Invert `_merge`."""
    kind = mapping.kind
    if kind == "qkv":
        d, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
        groups = whole.unflatten(0, (config.num_query_groups, -1))
        return [part.flatten(0, 1) for part in groups.split([queries * d, d, d], 1)]
    if kind == "glu":
        halves = [part.chunk(2) for part in whole.chunk(1 if mapping.shard_dim is None else peers)]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]
    return [whole[:vocab] if kind == "vocabulary" else whole]
