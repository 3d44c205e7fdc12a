"""When a node is lost, what was reserved there is reserved on another one with room. Ray would do that, too, but it
counts a node as lost after some ten seconds of silence and more; here its own process there is asked
(`living_nodes.py`).
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.errors import CallTimeout, PlacementError
from hybridrl.single_controller.cluster import living
from hybridrl.single_controller.placement.feasibility import Machine, check_feasible, in_words
from hybridrl.single_controller.placement.placement_groups import NODE_LABEL, machines_of_cluster, remove, reserve
from hybridrl.single_controller.placement.plan import Reservation

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)
MOVING_TIMEOUT_S = 90.0  # a cluster that grows by itself may take as long to bring another node


def move_from_lost_nodes(
    groups: "Sequence[PlacementGroup]",
    wanted: Sequence[Reservation],
    *,
    detached: bool,
    timeout_s: float = MOVING_TIMEOUT_S,
) -> "list[PlacementGroup]":
    """Return the groups with those replaced of which something is on a node that is gone; the same where none is.

    wanted: what the groups were made from, in any order. Raises PlacementError when there is no room within the time,
    saying what is missing where; what was on nodes that are gone is not reserved any more then.
    """
    tables = [_table(group) for group in groups]
    there = living({node for table in tables for node in table["bundles_to_node_id"].values()})
    reservations, moved = {one.name: one for one in wanted}, list(groups)
    for place, table in enumerate(tables):
        gone = set(table["bundles_to_node_id"].values()) - there
        if table["state"] == "CREATED" and not gone:
            continue
        if table["name"] not in reservations:
            raise PlacementError(
                f"the node of {_named(table)} was lost, which another pool has reserved and this one only uses"
            )
        logger.warning("%s lost its node; looking for another one with room, for %g s", _named(table), timeout_s)
        remove([groups[place]])
        try:
            [moved[place]] = reserve(
                [reservations[table["name"]]], detached=detached, avoided=gone, timeout_s=timeout_s
            )
        except CallTimeout:
            check_feasible(wanted, _living_machines())  # says more, where not even an empty cluster has room
            raise PlacementError(
                f"the node of {_named(table)} ({_needs(table)}) was lost, and no other had room for it "
                f"within {timeout_s:g} s: others use "
                "what the cluster has. End them, or add a node, and start the job again: it goes on from "
                "its last commit"
            ) from None
    return moved


def _living_machines() -> list[Machine]:
    machines = {machine.labels.get(NODE_LABEL, ""): machine for machine in machines_of_cluster()}
    there = living(machines)
    return [machine for node, machine in machines.items() if node in there]


def _table(group: "PlacementGroup") -> dict[str, Any]:
    from ray.util.placement_group import placement_group_table

    return placement_group_table(group)


def _named(table: dict[str, Any]) -> str:
    return table["name"] or table["placement_group_id"]


def _needs(table: dict[str, Any]) -> str:
    total: dict[str, float] = {}
    for bundle in table["bundles"].values():
        for name, amount in bundle.items():
            total[name] = total.get(name, 0) + amount
    return ", ".join(in_words(name, amount) for name, amount in total.items())
