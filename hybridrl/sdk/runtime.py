"""`current_worker`: what a process of a submitted job is told of the job and of itself."""

import os
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.master.jobs.job_context import JobContext, current_context
from hybridrl.sdk.role_type import role_key


@dataclass(frozen=True)
class JobInfo:
    """The job of a process.

    Attributes:
        name: As submitted.
        job_id: Unique name of this run.
        user_config: The job's config.
        accelerator_type: "GPU", "CPU", "TPU" or "NPU".
    """

    name: str
    job_id: str
    user_config: DictConfig
    accelerator_type: str


@dataclass(frozen=True)
class RoleInfo:
    """The role of a process.

    Attributes:
        total: Number of its processes.
        entry_point: What they run, as text.
        resource: What each process takes.
    """

    total: int
    entry_point: str
    resource: Any


@dataclass(frozen=True)
class ActorInfo:
    """A process of a job.

    Attributes:
        name: Unique in the run: `role-rank`.
        role: In upper case; compares equal to the member of `RLRoleType`.
        spec: Its role.
        rank, node_rank, local_rank: In its role, of its node in the role, and on its node.
        sub_master: None; the processes of a role have no master of their own.
    """

    name: str
    role: str
    spec: RoleInfo
    rank: int
    node_rank: int
    local_rank: int
    sub_master: str | None = None


@dataclass(frozen=True)
class Worker:
    """This process. world_size: number of processes of its role."""

    job_info: JobInfo
    actor_info: ActorInfo

    @property
    def world_size(self) -> int:
        return self.actor_info.spec.total


def current_worker() -> Worker:
    """Return this process of a submitted job, before its entry is constructed already.

    Raises:
        ConfigError: This is no process of a submitted job.
    """
    context = current_context()
    return Worker(_job_info(context), _actor_info(context))


def _job_info(context: JobContext) -> JobInfo:
    return JobInfo(context.job, context.run, OmegaConf.create(dict(context.config)), context.device_type)


def _actor_info(context: JobContext) -> ActorInfo:
    rank, node_rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "NODE_RANK", "LOCAL_RANK"))
    spec = RoleInfo(context.role_sizes[context.role], context.entry, context.resource)
    return ActorInfo(f"{context.role}-{rank}", role_key(context.role), spec, rank, node_rank, local_rank)
