"""Reserve placement groups on the connected Ray cluster, all of a pool or none.

Called by the driver.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from hybridrl.errors import CallTimeout
from hybridrl.single_controller.cluster import get_value
from hybridrl.single_controller.placement.feasibility import NodeCapacity
from hybridrl.single_controller.placement.plan import Reservation

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# Ray reserves free devices at once; a longer wait means that other jobs hold them.
PLACEMENT_TIMEOUT_S = 60.0
# Spreading is best effort: after this long any node is accepted.
SPREAD_TIMEOUT_S = 3.0
NODE_LABEL = "ray.io/node-id"  # set by Ray on every node


def cluster_nodes() -> list[NodeCapacity]:
    """Return the alive nodes of the connected cluster, ordered by address."""
    import ray

    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]), key=lambda node: (node["NodeManagerAddress"], node["NodeID"])
    )
    return [
        NodeCapacity(f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})", node["Resources"], node.get("Labels", {}))
        for node in nodes
    ]


def reserve(
    reservations: Sequence[Reservation],
    *,
    strategy: str = "STRICT_PACK",
    detached: bool = False,
    excluded: Collection[str] = (),
    timeout_s: float = PLACEMENT_TIMEOUT_S,
) -> "list[PlacementGroup]":
    """Return one created placement group per reservation; when one fails, remove all.

    Reservations with `apart_from` or `spread` are made one after the other, each on a node without the others. That
    includes reservations of other pools of the same job. `preferred_node` is used if it has free capacity.

    Args:
        strategy: Ray's strategy for the bundles of one group.
        excluded: ids of nodes that must not be used.
        timeout_s: seconds to wait for each group.

    Raises:
        CallTimeout: a group was not created in time.
    """
    groups: list[PlacementGroup] = []
    try:
        for one in reservations:
            if one.apart_from or one.spread:
                groups.append(_reserve_apart(one, excluded, strategy=strategy, detached=detached, timeout_s=timeout_s))
            else:
                groups.append(_request(one, excluded, strategy=strategy, detached=detached))
        for one, group in zip(reservations, groups, strict=True):
            _wait_created(one, group, timeout_s)
    except BaseException:
        remove(groups)
        raise
    return groups


def request(reservations: Sequence[Reservation]) -> "list[PlacementGroup]":
    """Request a placement group per reservation without waiting; Ray creates each when a node can hold it.

    The groups end with this driver.
    """
    return [_request(one, (), strategy="STRICT_PACK", detached=False) for one in reservations]


def num_created(groups: "Sequence[PlacementGroup]") -> int:
    """Return how many of these requested groups Ray has created."""
    from ray.util.placement_group import placement_group_table

    return sum(placement_group_table(group)["state"] == "CREATED" for group in groups)


def remove(groups: "Sequence[PlacementGroup]") -> None:
    """Remove the groups; Ray kills processes that still run on them."""
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def nodes_of(groups: "Sequence[PlacementGroup]") -> list[str]:
    """Return, for each group, the id of the node with its bundles."""
    from ray.util.placement_group import placement_group_table

    return [placement_group_table(group)["bundles_to_node_id"][0] for group in groups]


def _reserve_apart(
    one: Reservation, excluded: Collection[str], *, strategy: str, detached: bool, timeout_s: float
) -> "PlacementGroup":
    forbidden = _nodes_of_pools(one, one.apart_from) | set(excluded)
    discouraged = _nodes_of_pools(one, (one.pool,)) - forbidden if one.spread else set()
    if not {node.labels.get(NODE_LABEL) for node in cluster_nodes()} - forbidden - discouraged:
        discouraged = set()  # every node has a reservation of the pool
    for avoided, wait_s in (
        (forbidden | discouraged, SPREAD_TIMEOUT_S if discouraged else timeout_s),
        (forbidden, timeout_s),
    ):
        group = _request(one, avoided, strategy=strategy, detached=detached)
        try:
            _wait_created(one, group, wait_s)
            return group
        except BaseException as error:
            remove([group])
            if not isinstance(error, CallTimeout) or avoided == forbidden:
                raise
    raise AssertionError("the second round returns or raises")


def _request(one: Reservation, excluded: Collection[str], *, strategy: str, detached: bool) -> "PlacementGroup":
    from ray.util.placement_group import placement_group

    labels = {**one.labels, **({NODE_LABEL: f"!in({','.join(sorted(excluded))})"} if excluded else {})}
    return placement_group(
        [dict(bundle) for bundle in one.bundles],
        strategy=strategy,
        name=one.name,
        lifetime="detached" if detached else None,
        bundle_label_selector=[labels] * len(one.bundles) if labels else None,
        _soft_target_node_id=one.preferred_node
        if strategy == "STRICT_PACK" and one.preferred_node not in {"", *excluded}
        else None,
    )


def _wait_created(one: Reservation, group: "PlacementGroup", timeout_s: float) -> None:
    get_value(group.ready(), what=f"{one.name} of pool {one.pool!r}", timeout_s=timeout_s)


def _nodes_of_pools(one: Reservation, pools: Collection[str]) -> set[str]:
    """Return the nodes with reservations of these pools of the same job.

    They are found by the names of placement groups.
    """
    from ray.util.placement_group import placement_group_table

    job = one.name.rpartition("/")[0].removesuffix(one.pool)
    prefixes = tuple(f"{job}{pool}/node-" for pool in pools)
    table = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED" and prefixes]
    return {
        node for entry in table if entry["name"].startswith(prefixes) for node in entry["bundles_to_node_id"].values()
    }


def find_leftover_groups(job: str) -> "dict[str, PlacementGroup]":
    """Return the placement groups with a job's name, by name, including those of a previous driver."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    entries = [
        entry
        for entry in placement_group_table().values()
        if entry["name"].startswith(f"{job}/") and entry["state"] != "REMOVED"
    ]
    return {entry["name"]: PlacementGroup(PlacementGroupID.from_hex(entry["placement_group_id"])) for entry in entries}


def groups_of_nodes(prefix: str) -> "list[PlacementGroup]":
    """Return the placement groups PREFIX/node-0, PREFIX/node-1 and so on, including those of a previous driver."""
    found = {name.removeprefix(f"{prefix}/node-"): group for name, group in find_leftover_groups(prefix).items()}
    return [found[number] for number in sorted(filter(str.isdigit, found), key=int)]


def remove_leftover_groups(job: str) -> None:
    """Remove all placement groups with a job's name."""
    remove(list(find_leftover_groups(job).values()))
