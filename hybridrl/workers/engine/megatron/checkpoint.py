"""A Megatron engine's durable state, as megatron-core's `dist_checkpointing` lays it out: files of
torch.distributed.checkpoint (DCP).

Every process writes its own parts, which are cut anew for any other layout. Random states belong to a rank, not to a
part: they lie beside, and a rank that did not exist when the checkpoint was written keeps the random state it has.
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
from hybridrl.workers.engine.collective_errors import raise_together, writing
from hybridrl.workers.engine.megatron.network import Network

# Given to megatron-core in copies: it puts process groups into them.
FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the only one that loads under another layout
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
METADATA = (".metadata", "metadata.json")


def save_state(directory: str, *, chunks: list[Network], optimizer: MegatronOptimizer | None, step: int) -> None:
    """Write model, optimizer, step count and this rank's random state, fsynced.

    Collective. Raises StorageError on every rank.
    """
    state = _state(chunks, optimizer, is_loading=False) | {"step": step}
    with writing(directory):
        dist_checkpointing.save(
            state, directory, sharded_strategy=_InThisProcess("torch_dist", 1), content_metadata=dict(FORMAT)
        )
    problem = None
    try:
        _write_own(directory)
    except (OSError, RuntimeError) as error:  # torch's file format has RuntimeErrors of its own
        problem = error
    raise_together(problem, directory)


def _write_own(directory: str) -> None:
    own = os.path.join(directory, _random_file())
    torch.save(_random_state(), own)
    shared = [os.path.join(directory, name) for name in ("common.pt", "metadata.json")] if dist.get_rank() == 0 else []
    for path in [own, *shared]:
        _flush(path)


def load_state(directory: str, *, chunks: list[Network], optimizer: MegatronOptimizer | None) -> int:
    """Read into model, optimizer and random generators what `save_state` wrote. Collective. Returns the step count.

    Raises CheckpointError naming what is missing.
    """
    for name in METADATA:
        if not os.path.exists(os.path.join(directory, name)):
            raise CheckpointError(
                f"{directory} holds no state of a Megatron engine: {name} is missing; it was not "
                "completely written, or by another engine "
                "(its export is a model that any engine starts from)"
            )
    try:
        loaded = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), directory)
    except (CheckpointingException, dcp.api.CheckpointException, RuntimeError, KeyError, OSError) as error:
        raise CheckpointError(f"{directory} cannot be read into this model: {error}") from error
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"] if len(chunks) > 1 else loaded["model"])
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
        _unshare_steps(optimizer)
    own = os.path.join(directory, _random_file())
    if os.path.exists(own):
        _set_random_state(torch.load(own))
    return int(loaded["step"])


def _state(chunks: list[Network], optimizer: MegatronOptimizer | None, *, is_loading: bool) -> dict[str, Any]:
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    model = {name: chunk.sharded_state_dict(metadata=dict(FORMAT)) for name, chunk in zip(names, chunks, strict=True)}
    if optimizer is None:
        return model
    prepare_torch_adam(optimizer)
    return model | {"optimizer": optimizer.sharded_state_dict(model, is_loading, metadata=dict(FORMAT))}


class _InThisProcess(TorchDistSaveShardedStrategy):
    """Writes with DCP's own writer.

    Megatron's writer forks, and starts a server process, which a process full of threads should not.
    """

    def save(self, sharded_state_dict: dict, checkpoint_dir: str | Path) -> None:
        """Write the parts that this process is the first to have. Collective."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


# -- What megatron-core 0.16 lacks for torch's own Adam, which it uses without Transformer Engine and apex.


def prepare_torch_adam(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that has not stepped the state that saving and loading expect, and make a distributed one leave
    `step` out.

    Torch keeps `step` with each parameter, megatron-core with each group: copying it from where it is not stored fails.
    """
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                if not one.optimizer.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    one.optimizer.state[parameter] = {"step": torch.tensor(0.0)} | moments
        if isinstance(one, DistributedOptimizer):
            one._set_main_param_and_optimizer_states = MethodType(_copy_but_step, one)
            _keep_padding(one)


def _keep_padding(optimizer: DistributedOptimizer) -> None:
    """Count the padding at a bucket's end as part of it.

    megatron-core gathers buckets without it, and looks parameters up as if it were there. That goes wrong with more
    than one bucket, which is where tied embeddings on two pipeline stages have one of their own: it warns of "data
    corruption", and that is what it is.
    """
    for buffer in optimizer.buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


@torch.no_grad()
def _copy_but_step(self: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, index = self.model_param_group_index_map[parameter]
    main = self.optimizer.param_groups[group]["params"][index]
    for name, target in {"param": main, **self.optimizer.state[main]}.items():
        if name in tensors and name != "step":
            target.copy_(tensors[name])


def _unshare_steps(optimizer: MegatronOptimizer) -> None:
    """Loading puts one `step` tensor with all parameters, and Adam would count it up once for each."""
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).clone()


def _random_file() -> str:
    return f"random_{dist.get_rank()}.pt"


def _random_state() -> dict[str, torch.Tensor]:
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _flush(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
