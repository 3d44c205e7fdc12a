"""`BaseTrainer`: the base class of trainers in the style of DLRover's first generation.

    class UserTrainer(BaseTrainer):
        def init(self):
            self.RG_ACTOR.init_model()

        def fit(self):
            for step in range(self.config.steps):
                batch = self.RG_ROLLOUT.generate(step)
                self.RG_ACTOR.update(batch)

A job that names the class as its trainer constructs it, then calls `init` and `fit`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from omegaconf import DictConfig, OmegaConf

from hybridrl.master.jobs.job_handle import JobHandle
from hybridrl.sdk.first_generation.workload_handles import RoleGroupProxy, WorkloadHandle
from hybridrl.sdk.runtime import RLRoleType, role_key
from hybridrl.single_controller.placement.plan import Plan

BYTES_PER_MB = 2**20
RAY_NAMES = {"CPU": "cpu", "GPU": "accelerator", "TPU": "accelerator", "NPU": "accelerator"}


class WorkloadMeta(NamedTuple):
    """What a trainer knows of a role.

    Attributes:
        cls: The class of its workloads.
        resource: What each process takes: `cpu` cores, `accelerator` devices, `memory` MB, and custom resources.
    """

    cls: type
    resource: Mapping[str, float]


def _handles_of(role: RLRoleType) -> Any:
    return property(lambda trainer: trainer.get_actor_handles(role), doc=f"The handles of {role.lower()}, by rank.")


def _resource_of(role: RLRoleType) -> Any:
    return property(lambda trainer: trainer.get_workload_resource(role), doc=f"What a process of {role.lower()} takes.")


class BaseTrainer(ABC):
    """A training loop over workloads. The job constructs it, then calls `init` and `fit`.

    Subclasses keep the constructor's three arguments and pass them on. Every role of the job has an attribute
    `RG_<ROLE>`, also a role with a name of its own.

    Attributes:
        job: The `JobHandle`: report_step, report_commit, recover, resume_point. Set before `init`, not in `__init__`.
        config: The job's config.
        actor_handles: Role -> one handle per process, by rank. `handle.method.remote(...)` returns Ray's reference.
        actor_classes, actor_metas: Role -> `WorkloadMeta`.
        actors, references, rollouts, rewards, critics: The handles of these roles.
        actor_resource, reference_resource, rollout_resource, reward_resource, critic_resource: What each of their
            processes takes.
    """

    job: JobHandle

    actors = _handles_of(RLRoleType.ACTOR)
    references = _handles_of(RLRoleType.REFERENCE)
    rollouts = _handles_of(RLRoleType.ROLLOUT)
    rewards = _handles_of(RLRoleType.REWARD)
    critics = _handles_of(RLRoleType.CRITIC)
    actor_resource = _resource_of(RLRoleType.ACTOR)
    reference_resource = _resource_of(RLRoleType.REFERENCE)
    rollout_resource = _resource_of(RLRoleType.ROLLOUT)
    reward_resource = _resource_of(RLRoleType.REWARD)
    critic_resource = _resource_of(RLRoleType.CRITIC)

    def __init__(
        self,
        actor_handles: Mapping[Any, Sequence[WorkloadHandle]],
        actor_classes: Mapping[Any, WorkloadMeta] | None = None,
        config: Any = None,
        *,
        actor_metas: Mapping[Any, WorkloadMeta] | None = None,
    ) -> None:
        self._actor_handles = {role_key(role): list(handles) for role, handles in actor_handles.items()}
        metas = actor_metas if actor_classes is None else actor_classes
        self._actor_metas = {role_key(role): meta for role, meta in (metas or {}).items()}
        self._config = OmegaConf.create({} if config is None else config)
        self._role_groups = [_group_name(role) for role in self._actor_handles]
        for role, handles in self._actor_handles.items():
            setattr(self, _group_name(role), RoleGroupProxy(handles[0].worker_group))

    @classmethod
    def from_job(cls, job: JobHandle) -> Self:
        """Return the trainer of a job. The job calls it."""
        handles = {
            role_key(role): [WorkloadHandle(group, rank) for rank in range(group.world_size)]
            for role, group in job.groups.items()
        }
        metas = {
            role_key(role): WorkloadMeta(group.worker_cls, _resource(job.plan, role))
            for role, group in job.groups.items()
        }
        trainer = cls(handles, metas, OmegaConf.create(dict(job.config)))
        trainer.job = job
        return trainer

    @abstractmethod
    def init(self) -> None:
        """Prepare the training: tokenizer, data, models."""

    @abstractmethod
    def fit(self) -> None:
        """Train."""

    def __getattr__(self, name: str) -> Any:
        if "_role_groups" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__}.{name}: call super().__init__(actor_handles, actor_classes, config) first"
            )
        if name.startswith("RG_"):
            raise AttributeError(f"{name}: the job has no such role; it has {', '.join(self._role_groups)}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def config(self) -> DictConfig:
        return self._config

    @property
    def actor_handles(self) -> dict[RLRoleType | str, list[WorkloadHandle]]:
        return self._actor_handles

    @property
    def actor_classes(self) -> dict[RLRoleType | str, WorkloadMeta]:
        return self._actor_metas

    actor_metas = actor_classes

    def get_actor_handles(self, role: RLRoleType | str) -> list[WorkloadHandle]:
        """Return the handles of a role by rank; none if the job does not have the role."""
        return self._actor_handles.get(role_key(role), [])

    def get_role_groups(self) -> list[str]:
        """Return the names of the role groups, such as ["RG_ACTOR", "RG_ROLLOUT"]."""
        return list(self._role_groups)

    def get_workload_resource(self, role: RLRoleType | str) -> dict[str, float]:
        """Return what each process of a role takes, see `WorkloadMeta`; {} if the job does not have the role."""
        meta = self._actor_metas.get(role_key(role))
        return {} if meta is None else dict(meta.resource)


def _group_name(role: str) -> str:
    return f"RG_{re.sub(r'[^A-Z0-9_]', '_', role.upper())}"


def _resource(plan: Plan, role: str) -> dict[str, float]:
    """Return what each process of a role takes, under the names of the job builder's `resource()`."""
    [process] = [one for one in plan.processes if role in one.roles]
    amounts = {RAY_NAMES.get(name, name): amount for name, amount in process.resources.items()}
    if "memory" in amounts:
        amounts["memory"] = amounts["memory"] / BYTES_PER_MB
    return amounts
