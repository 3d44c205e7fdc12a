"""Checkpointed state of a Megatron engine, in megatron-core's `dist_checkpointing` layout.

The files are written by torch.distributed.checkpoint (DCP). Every process writes its own shards, which are resharded
for any other layout. Random states belong to a rank, not to a shard, and have files of their own. A rank that did not
exist when the checkpoint was written keeps its current random state.
"""

import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hybridrl.errors import CheckpointError
from hybridrl.system.atomic_write import fsync_path
from hybridrl.workers.engine import checkpoint_files
from hybridrl.workers.engine.megatron.network import Network
from hybridrl.workers.engine.safe_load import without_code
from hybridrl.workers.engine.sharded_engine import create_adam_state

# Pass copies to megatron-core: it adds process groups to the dict.
FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the only one that loads under another layout
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
METADATA = (".metadata", "metadata.json")


def save_state(directory: str, *, chunks: list[Network], optimizer: MegatronOptimizer | None, step: int) -> None:
    """Write model, optimizer, step count and this rank's random state, fsynced. Collective.

    Raises:
        StorageError: Some rank cannot write. Raised on every rank.
    """
    state = _state(chunks, optimizer, is_loading=False) | {"step": step}
    with checkpoint_files.collective_write(directory):
        dist_checkpointing.save(
            state, directory, sharded_strategy=_InProcessSaveStrategy("torch_dist", 1), content_metadata=dict(FORMAT)
        )
    problem = None
    try:
        _write_rank_files(directory)
    except (OSError, RuntimeError) as error:  # torch's file format raises RuntimeError
        problem = error
    checkpoint_files.raise_on_all_ranks(problem, directory)


def _write_rank_files(directory: str) -> None:
    random_path = os.path.join(directory, _random_file())
    torch.save(checkpoint_files.get_random_state(), random_path)
    shared = [os.path.join(directory, name) for name in ("common.pt", "metadata.json")] if dist.get_rank() == 0 else []
    for path in [random_path, *shared]:
        if os.path.exists(path):  # from 0.19 on, megatron-core keeps among the shards what was in common.pt
            fsync_path(path)


def load_state(directory: str, *, chunks: list[Network], optimizer: MegatronOptimizer | None) -> int:
    """Read what `save_state` wrote into model, optimizer and random generators. Collective.

    Returns:
        The step count.

    Raises:
        CheckpointError: Part of the state is missing; the message names it.
    """
    for name in METADATA:
        if not os.path.exists(os.path.join(directory, name)):
            raise CheckpointError(
                f"{directory} holds no state of a Megatron engine: {name} is missing, so the write did not finish or "
                "another engine wrote it. Export that checkpoint (`hybridrl export`) and start from the export"
            )
    try:
        with without_code(directory):
            loaded = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), directory)
    except (CheckpointingException, dcp.api.CheckpointException, RuntimeError, KeyError, OSError) as error:
        raise CheckpointError(f"{directory} cannot be read into this model: {error}") from error
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"] if len(chunks) > 1 else loaded["model"])
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
        _separate_steps(optimizer)
    random_path = os.path.join(directory, _random_file())
    if os.path.exists(random_path):
        checkpoint_files.set_random_state(torch.load(random_path, weights_only=True))
    return int(loaded["step"])


def _state(chunks: list[Network], optimizer: MegatronOptimizer | None, *, is_loading: bool) -> dict[str, Any]:
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    model = {name: chunk.sharded_state_dict(metadata=dict(FORMAT)) for name, chunk in zip(names, chunks, strict=True)}
    if optimizer is None:
        return model
    prepare_torch_adam(optimizer)
    return model | {"optimizer": optimizer.sharded_state_dict(model, is_loading, metadata=dict(FORMAT))}


class _InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """Write with DCP's own writer.

    Megatron's writer forks and starts a server process, which is unsafe in a process with many threads.
    """

    def save(self, sharded_state_dict: dict, checkpoint_dir: str | Path) -> None:
        """Write the shards of which this process is the main replica. Collective."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=checkpoint_files.PortableWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


# -- Fixes for megatron-core 0.16 with torch's own Adam, which it uses without Transformer Engine and apex.


def prepare_torch_adam(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer state that saving and loading expect before the first step.

    A distributed optimizer also skips `step` when it copies state. Torch keeps `step` with each parameter,
    megatron-core with each group, so copying it from the group fails.
    """
    for inner in optimizer.chained_optimizers:
        create_adam_state(inner.optimizer)
        if isinstance(inner, DistributedOptimizer):
            inner._set_main_param_and_optimizer_states = MethodType(_copy_all_but_step, inner)
            _count_bucket_padding(inner)


def _count_bucket_padding(optimizer: DistributedOptimizer) -> None:
    """Count the padding at a bucket's end as part of the bucket.

    megatron-core gathers buckets without the padding but looks parameters up as if it were there. With more than one
    bucket this corrupts data, and megatron-core warns of "data corruption". Tied embeddings on two pipeline stages have
    a bucket of their own.
    """
    for buffer in optimizer.buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


@torch.no_grad()
def _copy_all_but_step(
    self: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
) -> None:
    group, index = self.model_param_group_index_map[parameter]
    main = self.optimizer.param_groups[group]["params"][index]
    for name, target in {"param": main, **self.optimizer.state[main]}.items():
        if name in tensors and name != "step":
            target.copy_(tensors[name])


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own `step` tensor.

    Loading shares one tensor between all parameters, and Adam would increment it once for each.
    """
    for inner in optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).clone()


def _random_file() -> str:
    return f"random_{dist.get_rank()}.pt"
