"""Megatron's parallel groups, created once per process, and this process's position in them.

Ranks are ordered tensor, context, data, pipeline: tensor-parallel peers are adjacent. Megatron-core keeps its groups
per process, so the actor, reference, critic and reward model of one process have one layout.
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hybridrl.config.checks.megatron import layout_problems
from hybridrl.config.schema.workers import MegatronConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.engine.base import MeshPosition
from hybridrl.workers.engine.megatron.cpu_backend import patch_cuda_to_cpu
from hybridrl.workers.process_setup import collective_timeout

KEY = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel groups; the same for all engines of a process."""

    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    expert: int


_initialized: list[ParallelSizes] = []  # at most one: sizes of this process's groups
_world: list[dist.ProcessGroup | None] = []  # and the process group that they are parts of


def init_model_parallel(config: MegatronConfig, *, device: str, seed: int) -> ParallelSizes:
    """Create Megatron's groups in this process, or check that they exist with these sizes. Collective.

    Raises:
        ConfigError: The sizes do not fit the world, or this process already has other sizes.
    """
    if device == "cpu":
        patch_cuda_to_cpu()
    sizes = ParallelSizes(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        virtual_pipeline=config.virtual_pipeline_model_parallel_size,
        context=config.context_parallel_size,
        expert=config.expert_model_parallel_size,
    )
    if _world and _world != [dist.group.WORLD]:  # ended, with all its parts, by who made it
        destroy_model_parallel()
    if parallel_state.model_parallel_is_initialized():
        if [sizes] != _initialized:
            raise ConfigError(
                f"{KEY}: this process has the layout {_initialized[0]} and cannot also have {sizes}; set one "
                "layout for all roles"
            )
        return sizes
    if problems := list(layout_problems(config, world_size=dist.get_world_size(), key=KEY)):
        raise ConfigError("\n".join(problems))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=1,  # an expert is small and never sharded
        distributed_timeout_minutes=collective_timeout() / datetime.timedelta(minutes=1),
        # For the host side of checkpoints; on the CPU every group is gloo.
        create_gloo_process_groups=device == "cuda",
    )
    with torch.random.fork_rng(devices=None if device == "cuda" else []):
        # New weights need generators, although loading overwrites all.
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _initialized[:], _world[:] = [sizes], [dist.group.WORLD]
    return sizes


def destroy_model_parallel() -> None:
    """Destroy Megatron's groups in this process, so that tests can create others. Collective.

    Megatron-core only forgets its groups. Under gloo each has three threads, one of which wakes 150 times a second.
    """
    for group in _groups():
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    _initialized[:], _world[:] = [], []


def _groups() -> list[dist.ProcessGroup]:
    """Return the groups that Megatron-core created and nobody destroyed."""
    created = parallel_state._global_process_group_list or []  # its first entry stands for the world
    return [group for group in created[1:] if group in dist.distributed_c10d._world.pg_map]


def mesh_position() -> MeshPosition:
    """Return this process's mesh position.

    The output rank is on the last pipeline stage, with the head.
    """
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return MeshPosition(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_output_rank=first and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )
