"""`launch`: start the processes of a `Plan` on Ray and return worker groups.

Called by the trainer, or by the supervisor of a submitted job.
"""

from collections.abc import Mapping
from typing import Any

from hybridrl.single_controller.placement.feasibility import check_feasible
from hybridrl.single_controller.placement.node_loss import REPLACE_TIMEOUT_S
from hybridrl.single_controller.placement.placement_groups import cluster_nodes
from hybridrl.single_controller.placement.plan import Plan, actor_options
from hybridrl.single_controller.placement.pool_views import PlannedPoolView
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup, create_colocated_worker_cls
from hybridrl.single_controller.worker_group import RayClassWithInitArgs


def make_pools(
    plan: Plan, *, max_colocate_count: int = 10, detached: bool = False, replace_timeout_s: float = REPLACE_TIMEOUT_S
) -> dict[str, RayResourcePool]:
    """Return the plan's pools by name.

    A pool reserves its slots when the first group starts on it.
    """
    pools = {
        pool.name: RayResourcePool.planned(pool, max_colocate_count=max_colocate_count, detached=detached)
        for pool in plan.pools
    }
    for pool in pools.values():
        pool.replace_timeout_s = replace_timeout_s
    return pools


def launch(
    plan: Plan,
    classes: Mapping[str, RayClassWithInitArgs[Any]],
    pools: Mapping[str, Any],
    *,
    group_cls: type[RayWorkerGroup[Any]] = RayWorkerGroup,
    reattach: bool = False,
) -> dict[str, Any]:
    """Start the plan's processes on these pools and return one worker group per role.

    When a process cannot start, all are ended. Processes on detached pools outlive the driver.

    Args:
        reattach: use the processes that a previous driver of the plan's job started, where they still run.

    Raises:
        PlacementError: the connected cluster cannot hold the whole plan; nothing was started.
    """
    if reattach:
        for pool in pools.values():
            pool.reattach()
    else:
        check_feasible(plan.reservations(), cluster_nodes())
    pools = {process.label: PlannedPoolView(pools[process.pool], process, job=plan.job) for process in plan.processes}
    groups: dict[str, Any] = {}
    try:
        for process in plan.processes:
            recipe = create_colocated_worker_cls({role: classes[role] for role in process.roles})
            recipe.options = actor_options(process.resources) | recipe.options
            pool = pools[process.label]
            group = group_cls(
                pool,
                recipe,
                role=process.label,
                name_prefix=plan.job,
                share=process.share,
                detached=pool.detached,
                reattach=reattach,
                worker_env={**plan.worker_env, **process.environment},
            )
            groups |= group.spawn(process.roles)
    except BaseException:
        for group in groups.values():
            group.shutdown()
        raise
    return groups
