"""When a node is lost, Ray looks for another one with room for what was reserved there; until it has found one, nothing can start there."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.errors import PlacementError
from hybridrl.single_controller.feasibility import Machine, check_feasible, in_words
from hybridrl.single_controller.living_nodes import living
from hybridrl.single_controller.plan import Reservation
from hybridrl.single_controller.reservation import NODE_LABEL, machines_of_cluster

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 0.1
# Ray notices the loss of a machine that went without a word after some ten seconds, and looks for another one then.
RESCHEDULING_TIMEOUT_S = 90.0


def wait_placed(groups: "Sequence[PlacementGroup]", wanted: Sequence[Reservation], *, timeout_s: float = RESCHEDULING_TIMEOUT_S) -> None:
    """Return when every bundle of these groups is on a node that lives; at once where no node was lost.

    wanted: what the groups were made from. Raises PlacementError when there is no room within the time, saying what is missing where.
    """
    until, homeless = time.monotonic() + timeout_s, _homeless(groups)
    if homeless:
        logger.warning("%s lost its node; Ray looks for another one with room, for %g s", " and ".join(map(_named, homeless)), timeout_s)
    while homeless:
        if time.monotonic() > until:
            check_feasible(wanted, _living_machines())  # says more, where not even an empty cluster has room
            what = "; ".join(f"{_named(table)} ({_needs(table)})" for table in homeless)
            raise PlacementError(
                f"the node of {what} was lost, and no other had room for it within {timeout_s:g} s: others use what the cluster has. "
                "End them, or add a node, and start the job again: it goes on from its last commit"
            )
        time.sleep(LOOK_EVERY_S)
        homeless = _homeless(groups)


def _living_machines() -> list[Machine]:
    machines = {machine.labels.get(NODE_LABEL, ""): machine for machine in machines_of_cluster()}
    there = living(machines)
    return [machine for node, machine in machines.items() if node in there]


def _homeless(groups: "Sequence[PlacementGroup]") -> list[dict[str, Any]]:
    """Ray's tables of those groups of which something is on no node, or on one that is gone."""
    from ray.util.placement_group import placement_group_table

    tables = [placement_group_table(group) for group in groups]
    there = living({node for table in tables for node in table["bundles_to_node_id"].values()})
    return [table for table in tables if table["state"] != "CREATED" or not there.issuperset(table["bundles_to_node_id"].values())]


def _named(table: dict[str, Any]) -> str:
    return table["name"] or table["placement_group_id"]


def _needs(table: dict[str, Any]) -> str:
    total: dict[str, float] = {}
    for bundle in table["bundles"].values():
        for name, amount in bundle.items():
            total[name] = total.get(name, 0) + amount
    return ", ".join(in_words(name, amount) for name, amount in total.items())
