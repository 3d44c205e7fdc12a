"""`launch`: the one place where a plan becomes processes, whether a trainer calls it or a job that was submitted."""

from collections.abc import Mapping
from typing import Any

from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.placement.feasibility import check_feasible
from hybridrl.single_controller.placement.placement_groups import machines_of_cluster
from hybridrl.single_controller.placement.plan import Plan, ProcessPlan, actor_options
from hybridrl.single_controller.placement.pool_views import PlannedSlots
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

GroupClass = type[LocalWorkerGroup] | type[RayWorkerGroup]


def pools_of(plan: Plan, *, max_colocate_count: int = 10, detached: bool = False) -> dict[str, RayResourcePool]:
    """Return the plan's pools. They reserve nothing before the first group starts on them; `release` gives it back."""
    return {
        pool.name: RayResourcePool.planned(pool, max_colocate_count=max_colocate_count, detached=detached)
        for pool in plan.pools
    }


def launch(
    plan: Plan,
    classes: Mapping[str, RayClassWithInitArgs],
    pools: Mapping[str, Any],
    *,
    group_cls: GroupClass = RayWorkerGroup,
    take_up: bool = False,
) -> dict[str, Any]:
    """Start the plan's processes on these pools and return one worker group per role. When one cannot start, none is
    left running.

    Those on detached pools outlive the driver; take_up: go on with the ones that an earlier driver of the plan's job
    has left there. Raises PlacementError before anything starts when the connected cluster cannot hold all of the plan.
    """
    if not issubclass(group_cls, LocalWorkerGroup):
        if take_up:
            for pool in pools.values():
                pool.take_up()
        else:
            check_feasible(plan.reservations(), machines_of_cluster())
        pools = {process.label: PlannedSlots(pools[process.pool], process, job=plan.job) for process in plan.processes}
    else:
        pools = {process.label: pools[process.pool] for process in plan.processes}
    groups: dict[str, Any] = {}
    try:
        for process in plan.processes:
            groups |= _launch_process(plan, process, classes, pools[process.label], group_cls, take_up=take_up)
    except BaseException:
        for group in groups.values():
            group.shutdown()
        raise
    return groups


def _launch_process(
    plan: Plan,
    process: ProcessPlan,
    classes: Mapping[str, RayClassWithInitArgs],
    pool: Any,
    group_cls: GroupClass,
    *,
    take_up: bool,
) -> dict[str, Any]:
    if issubclass(group_cls, LocalWorkerGroup):
        return {role: group_cls(pool, classes[role], role=role) for role in process.roles}
    recipe = create_colocated_worker_cls({role: classes[role] for role in process.roles})
    recipe.options = actor_options(process.resources) | recipe.options
    group = group_cls(
        pool,
        recipe,
        role=process.label,
        name_prefix=plan.job,
        share=process.share,
        detached=pool.detached,
        take_up=take_up,
        worker_env={**plan.worker_env, **process.environment},
    )
    return group.spawn(process.roles)
