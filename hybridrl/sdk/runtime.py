"""`current_worker`: what a process of a submitted job is told of the job and of itself; the names of its roles."""

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.master.jobs.job_context import current_context


class RLRoleType(StrEnum):
    """A role of reinforcement learning, as DLRover writes it.

    Its value is its name in upper case; a job's own roles are plain text of the same form.
    """

    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"
    TRAINER = "TRAINER"


def role_key(role: str) -> "RLRoleType | str":
    """Return a role in upper case: the member of `RLRoleType` if there is one, else text.

    Both compare equal.
    """
    name = role.upper()
    return RLRoleType.__members__.get(name, name)


def role_name(role: str) -> str:
    """Return a role in lower case, as jobs and worker groups name it."""
    return str(role).lower()


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
class CurrentWorker:
    """This process. world_size: number of processes of its role."""

    job_info: JobInfo
    actor_info: ActorInfo

    @property
    def world_size(self) -> int:
        return self.actor_info.spec.total


def current_worker() -> CurrentWorker:
    """Return this process of a submitted job, before its entry is constructed already.

    Raises:
        ConfigError: This is no process of a submitted job.
    """
    context = current_context()
    job = JobInfo(context.job, context.run, OmegaConf.create(dict(context.config)), context.device_type)
    role = RoleInfo(context.role_sizes[context.role], context.entry, context.resource)
    rank, node_rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "NODE_RANK", "LOCAL_RANK"))
    name = f"{context.role}-{rank}"
    return CurrentWorker(job, ActorInfo(name, role_key(context.role), role, rank, node_rank, local_rank))
