"""Roles of a job, and the resource pools that they are placed on.

The front ends and the trainers use it, in the driver. It decides nothing about nodes: `master/plan/planner.py` does.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from hybridrl import master, single_controller
from hybridrl.errors import ConfigError
from hybridrl.single_controller.invocation import invocations_of
from hybridrl.single_controller.placement.node_slots import CAPACITY_HINT, ResourcePool

if TYPE_CHECKING:
    from hybridrl.single_controller.placement.plan import Plan

INIT_METHOD = "init_model"  # of every worker class; loads what the role needs


class Role(StrEnum):
    """Purpose of a worker, equal to the role's name in keys, process names and metrics.

    `str(role)` is needed only for names that other processes get: they do not import this module.
    """

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Evaluator = "evaluator"
    Env = "env"
    TeacherModel = "teacher"


def worker_role(role: Role) -> str:
    """Return the role argument of a worker class: an evaluator holds a rollout."""
    return str(Role.Rollout if role == Role.Evaluator else role)


def check_worker_classes(role_worker_mapping: Mapping[Role, type]) -> None:
    """Raise ConfigError for a worker class that the trainer could not prepare."""
    for role, worker_cls in role_worker_mapping.items():
        if INIT_METHOD not in invocations_of(worker_cls):
            raise ConfigError(
                f"role_worker_mapping[{str(role)!r}]: {worker_cls.__name__} registers no {INIT_METHOD}, which the "
                f"trainer calls on every group; add @register(Dispatch.ONE_TO_ALL) def {INIT_METHOD}(self, "
                "total_optimizer_steps)"
            )


class ResourcePoolManager:
    """Pools of worker slots and the roles placed on them.

    Args:
        resource_pool_spec: Pool name -> worker processes on each of its nodes, for instance `{"global_pool": [8, 8]}`.
        mapping: Role -> pool name.
        max_colocate_count: Processes that may share a slot, see `ResourcePool`.
        use_gpu: Whether each slot holds a GPU. None: if the cluster has any.
        backend: "ray", or "local" for one worker in the calling process.
        hints: Pool name -> setting to change when the cluster is too small for the pool.

    Raises:
        ConfigError: `mapping` names a pool that `resource_pool_spec` does not have.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role, str],
        max_colocate_count: int = 3,
        *,
        use_gpu: bool | None = None,
        backend: str = "ray",
        hints: Mapping[str, str] | None = None,
    ):
        unknown = sorted({pool for pool in mapping.values() if pool not in resource_pool_spec})
        if unknown:
            raise ConfigError(
                f"mapping names the pools {unknown}, but resource_pool_spec has {sorted(resource_pool_spec)}"
            )
        self.resource_pool_spec, self.mapping = resource_pool_spec, dict(mapping)
        self.use_gpu, self.backend = use_gpu, backend
        self.max_colocate_count, self.hints = max_colocate_count, dict(hints or {})
        self.resource_pool_dict: dict[str, ResourcePool] = {}

    def job_spec(self, pool_of_role: Mapping[str, str], *, colocate: str, device_type: str) -> "master.JobSpec":
        """Describe a job with one process of each role on every slot of its pool."""
        return master.JobSpec(
            tuple(
                master.RoleSpec(role, pool, tuple(self.resource_pool_spec[pool])) for role, pool in pool_of_role.items()
            ),
            tuple(
                master.PoolSpec(name, tuple(processes), colocate, hint=self.hints.get(name, CAPACITY_HINT))
                for name, processes in self.resource_pool_spec.items()
            ),
            device_type=device_type,
        )

    def plan(
        self,
        job: str,
        pool_of_role: Mapping[str, str],
        *,
        colocate: str,
        worker_env: Mapping[str, str] | None = None,
        use_gpu: bool | None = None,
    ) -> "Plan":
        """Return the placement of all processes of these roles.

        Args:
            job: Prefix of all names.
            pool_of_role: Role -> pool name.
            colocate: "process" puts all roles of a pool into one process per slot. "device" gives each role its own
                process and an equal share of the slot.
            worker_env: Environment variables of the worker processes.
            use_gpu: Overrides the manager's own setting.
        """
        use_gpu = self.use_gpu if use_gpu is None else use_gpu
        if use_gpu is None:
            use_gpu = self.backend == "ray" and single_controller.cluster_has_gpus()
        spec = self.job_spec(pool_of_role, colocate=colocate, device_type="GPU" if use_gpu else "CPU")
        return master.plan_job(spec, job, worker_env=worker_env)

    def resize(self, pool: str, processes: Sequence[int]) -> None:
        """Set the processes on each node of a pool, for the next plan."""
        self.resource_pool_spec = {**self.resource_pool_spec, pool: list(processes)}

    def create_resource_pool(
        self,
        *,
        job: str = "hybridrl",
        plan: "Plan | None" = None,
        detached: bool = False,
        replace_timeout_s: float | None = None,
    ) -> None:
        """Create the pools. Devices are reserved when the first group starts on a pool.

        Args:
            job: Prefix of all names, if there is no plan.
            plan: Placement to follow. None: the manager plans.
            detached: Whether the reservations outlive the driver.
            replace_timeout_s: Seconds to find a node in place of a lost one. None: a default.
        """
        if self.backend == "local":
            self.resource_pool_dict = {
                name: ResourcePool(processes) for name, processes in self.resource_pool_spec.items()
            }
            return
        plan = plan or self.plan(job, {}, colocate="process")
        limit = {} if replace_timeout_s is None else {"replace_timeout_s": replace_timeout_s}
        pools = single_controller.launch.make_pools(
            plan, max_colocate_count=self.max_colocate_count, detached=detached, **limit
        )
        self.resource_pool_dict = {**pools}

    def get_resource_pool(self, role: Role) -> ResourcePool:
        return self.resource_pool_dict[self.mapping[role]]

    def share_a_pool(self, *roles: Role) -> bool:
        """Return whether all mapped roles among these are on the same pool."""
        return len({self.mapping[role] for role in roles if role in self.mapping}) <= 1

    def check_colocation(self, colocate: str) -> None:
        """Raise ConfigError if an actor and a rollout would be two roles of one process.

        A weight push between them would wait for itself.
        """
        both = Role.Actor in self.mapping and Role.Rollout in self.mapping
        if both and colocate == "process" and self.share_a_pool(Role.Actor, Role.Rollout):
            raise ConfigError(
                f"trainer.colocate={colocate}: Role.Actor and Role.Rollout are on the pool "
                f"{self.mapping[Role.Actor]!r} and would share "
                "a process; map Role.ActorRollout there, or give each a process of its own with trainer.colocate=device"
            )

    def get_n_gpus(self) -> int:
        """Return the number of worker slots over all pools, whatever their device."""
        return sum(sum(processes) for processes in self.resource_pool_spec.values())

    def pools_by_role(self) -> dict[str, set[str]] | None:
        """Return the pool names of each role. No two pools share a device.

        None with backend "local", where all roles share the devices of one process.
        """
        return None if self.backend == "local" else {str(role): {pool} for role, pool in self.mapping.items()}

    def release(self) -> None:
        """Release all reserved devices."""
        for pool in self.resource_pool_dict.values():
            pool.release()
