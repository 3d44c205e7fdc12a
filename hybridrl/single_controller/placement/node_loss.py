"""Reserve slots of a lost node again on another node.

Ray does this too, but it needs 10 s or more to declare a node dead. Here each node's raylet is contacted directly
(`cluster.py`). Called by the driver before it restarts the processes that were on a lost node.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.errors import CallTimeout, PlacementError
from hybridrl.single_controller.cluster import alive_nodes
from hybridrl.single_controller.placement.feasibility import NodeCapacity, check_feasible, format_amount
from hybridrl.single_controller.placement.placement_groups import NODE_LABEL, cluster_nodes, remove, reserve
from hybridrl.single_controller.placement.plan import Reservation

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)
REPLACE_TIMEOUT_S = 90.0  # an autoscaling cluster may need this long to add a node


def replace_lost_nodes(
    groups: "Sequence[PlacementGroup]",
    reservations: Sequence[Reservation],
    *,
    detached: bool,
    timeout_s: float = REPLACE_TIMEOUT_S,
) -> "list[PlacementGroup]":
    """Return the groups, with those that have a bundle on a lost node replaced.

    Args:
        groups: one per reservation, in any order.
        reservations: the reservations of the groups.
        detached: whether new groups outlive the driver.
        timeout_s: seconds to reserve each group.

    Raises:
        PlacementError: no node had capacity in time; says what is missing where. Groups on lost nodes are then removed.
    """
    tables = [_table(group) for group in groups]
    alive = alive_nodes(set().union(*map(_nodes, tables)))
    by_name, replaced = {one.name: one for one in reservations}, list(groups)
    for index, table in enumerate(tables):
        lost = _nodes(table) - alive
        if table["state"] == "CREATED" and not lost:
            continue
        name = table["name"] or table["placement_group_id"]
        if table["name"] not in by_name:
            raise PlacementError(
                f"the node of {name} was lost; it belongs to another pool, which has to reserve a new one"
            )
        if not alive_capacities():
            raise PlacementError(
                f"the node of {name} was lost, and no other node of the Ray cluster answers; restart the job on "
                "another cluster, it resumes from its newest checkpoint"
            )
        logger.warning("the node of %s was lost; reserving another node within %g s", name, timeout_s)
        remove([groups[index]])
        try:
            [replaced[index]] = reserve([by_name[table["name"]]], detached=detached, excluded=lost, timeout_s=timeout_s)
        except CallTimeout:
            check_feasible(reservations, alive_capacities())  # more precise where even an empty cluster is too small
            raise PlacementError(
                f"the node of {name} ({_format_resources(table)}) was lost, and no other node had free capacity within "
                f"{timeout_s:g} s: other processes use it. End them or add a node, then restart the job; it resumes "
                "from its newest checkpoint"
            ) from None
    return replaced


def alive_capacities() -> list[NodeCapacity]:
    """Return the nodes of the connected cluster whose raylet answers."""
    capacities = {node.labels.get(NODE_LABEL, ""): node for node in cluster_nodes()}
    alive = alive_nodes(capacities)
    return [capacity for node, capacity in capacities.items() if node in alive]


def _nodes(table: dict[str, Any]) -> set[str]:
    """Return the ids of a placement group's nodes.

    Ray has none for a bundle that waits for a node again.
    """
    return set(table["bundles_to_node_id"].values()) - {""}


def _table(group: "PlacementGroup") -> dict[str, Any]:
    from ray.util.placement_group import placement_group_table

    return placement_group_table(group)


def _format_resources(table: dict[str, Any]) -> str:
    total: dict[str, float] = {}
    for bundle in table["bundles"].values():
        for name, amount in bundle.items():
            total[name] = total.get(name, 0) + amount
    return ", ".join(format_amount(name, amount) for name, amount in total.items())
