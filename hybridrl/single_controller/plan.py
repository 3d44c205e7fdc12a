"""A `Plan` says which processes a job has; `launch` makes them. Both the trainer and the master come here to start workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.single_controller.colocation import create_colocated_worker_cls
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup

GroupClass = type[LocalWorkerGroup] | type[RayWorkerGroup]


@dataclass(frozen=True)
class ProcessPlan:
    """One process per slot of a pool: the roles it holds and its share of the slot's device."""

    pool: str
    roles: tuple[str, ...]
    share: float = 1.0


@dataclass(frozen=True)
class Plan:
    """All processes of a job. `job` prefixes their names, `worker_env` is set in each of them."""

    job: str
    processes: tuple[ProcessPlan, ...]
    worker_env: dict[str, str] = field(default_factory=dict)


def plan_processes(job: str, pool_of_role: Mapping[str, str], *, colocate: str, worker_env: dict[str, str] | None = None) -> Plan:
    """Return the plan for roles placed on pools.

    colocate: "process" puts all roles of a pool into one process per slot, "device" gives each role its own process and an equal
    share of the slot.
    """
    roles_of_pool: dict[str, list[str]] = {}
    for role, pool in pool_of_role.items():
        roles_of_pool.setdefault(pool, []).append(role)
    processes: list[ProcessPlan] = []
    for pool, roles in roles_of_pool.items():
        if colocate == "process":
            processes.append(ProcessPlan(pool, tuple(roles)))
        else:
            # Ray counts shares in ten-thousandths; rounding down keeps their sum within the slot.
            share = int(1e4 / len(roles)) / 1e4
            processes.extend(ProcessPlan(pool, (role,), share) for role in roles)
    return Plan(job, tuple(processes), worker_env or {})


def launch(
    plan: Plan,
    classes: Mapping[str, RayClassWithInitArgs],
    pools: Mapping[str, Any],
    *,
    group_cls: GroupClass = RayWorkerGroup,
) -> dict[str, Any]:
    """Start the plan's processes on these pools and return one worker group per role. When one cannot start, none is left running."""
    groups: dict[str, Any] = {}
    try:
        for process in plan.processes:
            groups |= _launch_process(plan, process, classes, pools[process.pool], group_cls)
    except BaseException:
        for group in groups.values():
            group.shutdown()
        raise
    return groups


def _launch_process(
    plan: Plan, process: ProcessPlan, classes: Mapping[str, RayClassWithInitArgs], pool: Any, group_cls: GroupClass
) -> dict:
    if issubclass(group_cls, LocalWorkerGroup):
        return {role: group_cls(pool, classes[role], role=role) for role in process.roles}
    recipe = create_colocated_worker_cls({role: classes[role] for role in process.roles})
    group = group_cls(pool, recipe, role="+".join(process.roles), name_prefix=plan.job, share=process.share, worker_env=plan.worker_env)
    return group.spawn(process.roles)
