"""Reservations become placement groups of the connected Ray cluster, all of them or none."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from hybridrl.errors import CallTimeout
from hybridrl.single_controller.awaiting import wait_ready
from hybridrl.single_controller.placement.feasibility import Machine
from hybridrl.single_controller.placement.plan import Reservation

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# Reserving devices is immediate when they are free; a longer wait means that somebody else holds them.
PLACEMENT_TIMEOUT_S = 60.0
# To spread is a wish: after this long it is given up for any machine.
SPREAD_TIMEOUT_S = 3.0
NODE_LABEL = "ray.io/node-id"  # every node of Ray has it


def machines_of_cluster() -> list[Machine]:
    """Return the living nodes of the connected cluster, with all they have, taken or not."""
    import ray

    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]), key=lambda node: (node["NodeManagerAddress"], node["NodeID"])
    )
    return [
        Machine(f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})", node["Resources"], node.get("Labels", {}))
        for node in nodes
    ]


def reserve(
    reservations: Sequence[Reservation],
    *,
    strategy: str = "STRICT_PACK",
    detached: bool = False,
    avoided: Collection[str] = (),
    timeout_s: float = PLACEMENT_TIMEOUT_S,
) -> "list[PlacementGroup]":
    """Return one placement group for each, with all its bundles there. When one cannot be had, none stays reserved.

    strategy: Ray's, of the bundles of one group. Those that keep apart are reserved one after the other, each where the
    others are not; that goes for those of other pools of the same job, too. One that would rather be on some node is
    there if it has room. avoided: ids of nodes. Raises CallTimeout for what is not there in time.
    """
    groups: list[PlacementGroup] = []
    try:
        for one in reservations:
            if one.apart_from or one.spread:
                groups.append(_reserve_apart(one, avoided, strategy=strategy, detached=detached, timeout_s=timeout_s))
            else:
                groups.append(_ask(one, avoided, strategy=strategy, detached=detached))
        for one, group in zip(reservations, groups, strict=True):
            _wait(one, group, timeout_s)
    except BaseException:
        remove(groups)
        raise
    return groups


def remove(groups: "Sequence[PlacementGroup]") -> None:
    """Give what was reserved back. Processes that still run there are ended by Ray."""
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def nodes_of(groups: "Sequence[PlacementGroup]") -> list[str]:
    """Return, for each group, the id of the node that its bundles are on."""
    from ray.util.placement_group import placement_group_table

    return [placement_group_table(group)["bundles_to_node_id"][0] for group in groups]


def _reserve_apart(
    one: Reservation, avoided: Collection[str], *, strategy: str, detached: bool, timeout_s: float
) -> "PlacementGroup":
    never = _nodes_of_pools(one, one.apart_from) | set(avoided)
    rather_not = _nodes_of_pools(one, (one.pool,)) - never if one.spread else set()
    if not {machine.labels.get(NODE_LABEL) for machine in machines_of_cluster()} - never - rather_not:
        rather_not = set()  # every machine has one of the pool
    for elsewhere, within_s in (
        (never | rather_not, SPREAD_TIMEOUT_S if rather_not else timeout_s),
        (never, timeout_s),
    ):
        group = _ask(one, elsewhere, strategy=strategy, detached=detached)
        try:
            _wait(one, group, within_s)
            return group
        except BaseException as error:
            remove([group])
            if not isinstance(error, CallTimeout) or elsewhere == never:
                raise
    raise AssertionError("the second round returns or raises")


def _ask(one: Reservation, avoided: Collection[str], *, strategy: str, detached: bool) -> "PlacementGroup":
    from ray.util.placement_group import placement_group

    labels = {**one.labels, **({NODE_LABEL: f"!in({','.join(sorted(avoided))})"} if avoided else {})}
    return placement_group(
        [dict(bundle) for bundle in one.bundles],
        strategy=strategy,
        name=one.name,
        lifetime="detached" if detached else None,
        bundle_label_selector=[labels] * len(one.bundles) if labels else None,
        _soft_target_node_id=one.rather_on
        if strategy == "STRICT_PACK" and one.rather_on not in {"", *avoided}
        else None,
    )


def _wait(one: Reservation, group: "PlacementGroup", timeout_s: float) -> None:
    wait_ready(group.ready(), what=f"{one.name} of pool {one.pool!r}", timeout_s=timeout_s)


def _nodes_of_pools(one: Reservation, pools: Collection[str]) -> set[str]:
    """The nodes on which pools of the same job have something, found by the names of their placement groups."""
    from ray.util.placement_group import placement_group_table

    job = one.name.rpartition("/")[0].removesuffix(one.pool)
    prefixes = tuple(f"{job}{pool}/node-" for pool in pools)
    table = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED" and prefixes]
    return {
        node for entry in table if entry["name"].startswith(prefixes) for node in entry["bundles_to_node_id"].values()
    }


def find_left(job: str) -> "dict[str, PlacementGroup]":
    """Return what a job has reserved under its name, by name: also what an earlier driver of it has left."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    left = [
        entry
        for entry in placement_group_table().values()
        if entry["name"].startswith(f"{job}/") and entry["state"] != "REMOVED"
    ]
    return {entry["name"]: PlacementGroup(PlacementGroupID.from_hex(entry["placement_group_id"])) for entry in left}


def remove_left(job: str) -> None:
    """Give back what a job has reserved under its name and nobody holds any more."""
    remove(list(find_left(job).values()))
