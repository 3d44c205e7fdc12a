"""Which processes share which part of a model: Megatron's parallel groups, made once per process, and this process's
place in them.

Ranks count tensor-parallel peers first, then context, then data, then pipeline stages. Megatron-core keeps its groups
per process, so the actor, the reference, the critic and the reward model of one process have one layout.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hybridrl.config.checks.megatron import layout_problems
from hybridrl.config.schema.workers import MegatronConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.engine.base import Place
from hybridrl.workers.engine.megatron.cpu_backend import let_cuda_mean_cpu

KEY = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class Sizes:
    """How many processes share what; the same for all engines of a process."""

    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    expert: int


_entered: list[Sizes] = []  # at most one: what this process's groups are


def enter_layout(config: MegatronConfig, *, device: str, seed: int) -> Sizes:
    """Make Megatron's groups for this process, or check that they are these already. Collective. Raises ConfigError."""
    if not dist.is_initialized():
        # Collectives of a world of one: a store in this process's memory, so no port.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    if device == "cpu":
        let_cuda_mean_cpu()
    sizes = Sizes(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        virtual_pipeline=config.virtual_pipeline_model_parallel_size,
        context=config.context_parallel_size,
        expert=config.expert_model_parallel_size,
    )
    if parallel_state.model_parallel_is_initialized():
        if [sizes] != _entered:
            raise ConfigError(
                f"{KEY}: this process has the layout {_entered} and cannot have {sizes} too; use one "
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
        expert_tensor_parallel_size=1,  # an expert is small: it is never cut
        create_gloo_process_groups=device
        == "cuda",  # for the host's side of checkpoints; on the CPU every group is gloo
    )
    with torch.random.fork_rng(devices=None if device == "cuda" else []):
        tensor_parallel.model_parallel_cuda_manual_seed(seed)  # new weights need generators, though all are overwritten
    _entered[:] = [sizes]
    return sizes


def leave_layout() -> None:
    """Destroy Megatron's groups of this process, so that another layout can be entered. Collective. For tests."""
    parallel_state.destroy_model_parallel()
    _entered.clear()


def place() -> Place:
    """Return this process's place. The answering peer is on the last pipeline stage, where the head is."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return Place(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        answers=first and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )
