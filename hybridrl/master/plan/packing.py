"""Packing: choose a machine for each reservation of a job.

Roles that heavy edges join share a machine.

Pure functions of the plan and the cluster's machines. Edges between roles are added up to edges between their pools.
From the heaviest to the lightest, the nodes of both ends are put on one machine if all of the job still fits. An edge
therefore never makes a job infeasible. The result is a preference for Ray: if another job has taken the machine
meanwhile, the reservation goes elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridrl.master.plan.spec import JobSpec
from hybridrl.single_controller.placement.feasibility import NodeCapacity, Unit, assign_to_nodes
from hybridrl.single_controller.placement.placement_groups import NODE_LABEL
from hybridrl.single_controller.placement.plan import Plan, Reservation

# Placement searches per job. An edge between two pools costs one search, or, if not all pairs of their nodes fit, one
# more per pair.
MAX_TRIALS = 200
Pair = tuple[str, str]


def pack_plan(plan: Plan, spec: JobSpec, machines: Sequence[NodeCapacity]) -> Plan:
    """Return the plan with a preferred machine for each reservation.

    Without joined roles, or with one machine, the plan is returned unchanged.
    """
    together = pack(plan.reservations(), pool_edges(spec), machines) if len(machines) > 1 else {}
    if not together:
        return plan
    preferred = {name: machines[number].labels.get(NODE_LABEL, "") for name, number in together.items()}

    def with_preference(one: Reservation) -> Reservation:
        return replace(one, preferred_node=preferred.get(one.name, ""))

    pools = tuple(replace(pool, reservations=tuple(map(with_preference, pool.reservations))) for pool in plan.pools)
    driver = plan.driver and replace(plan.driver, reservation=with_preference(plan.driver.reservation))
    return replace(plan, pools=pools, driver=driver)


def pool_edges(spec: JobSpec) -> dict[Pair, float]:
    """Return (pool, pool) -> total weight of all edges between them, in both directions, heaviest first."""
    pool_of = {role.name: role.pool for role in spec.roles}
    edges: dict[Pair, float] = {}
    for edge in spec.edges:
        first, second = sorted((pool_of[edge.source], pool_of[edge.target]))
        if first != second and edge.weight:
            edges[first, second] = edges.get((first, second), 0.0) + edge.weight
    return dict(sorted(edges.items(), key=lambda item: -item[1]))


def pack(
    reservations: Sequence[Reservation], edges: Mapping[Pair, float], machines: Sequence[NodeCapacity]
) -> dict[str, int]:
    """Return reservation -> number of its machine. Empty if no two reservations can be joined.

    Args:
        reservations: Of the whole job. All of them fit in the result; `spread` is kept if the machines allow it.
        edges: Between pools, heaviest first.
        machines: Of the cluster.
    """
    units = _single_units(reservations, machines)
    places, trials, joined = assign_to_nodes(units, machines), 0, False
    if places is None:
        return {}
    for first, second in edges:
        pairs = _node_pairs(units, first, second)
        for attempt in ([pairs] if len(pairs) > 1 else []) + [[pair] for pair in pairs]:
            if trials == MAX_TRIALS:
                break
            trials += 1
            candidate = _join(units, attempt)
            found = assign_to_nodes(candidate, machines)
            if found is not None:
                units, places, joined = candidate, found, True
            if found is not None and len(attempt) == len(pairs):
                break
    return {one.name: place for unit, place in zip(units, places, strict=True) for one in unit} if joined else {}


def _single_units(reservations: Sequence[Reservation], machines: Sequence[NodeCapacity]) -> list[Unit]:
    """Return each reservation as a unit of its own.

    Spread ones stay apart if there are enough machines.
    """
    spread_units: list[Unit] = [
        (replace(one, apart_from=(*one.apart_from, one.pool)) if one.spread else one,) for one in reservations
    ]
    return spread_units if assign_to_nodes(spread_units, machines) is not None else [(one,) for one in reservations]


def _node_pairs(units: Sequence[Unit], first: str, second: str) -> list[Pair]:
    """Pair the nodes of two pools by number. The pool with fewer nodes is repeated."""
    names = {pool: [one.name for unit in units for one in unit if one.pool == pool] for pool in (first, second)}
    one, other = (sorted(names[pool], key=lambda name: int(name.rpartition("-")[2])) for pool in (first, second))
    return (
        [(one[i % len(one)], other[i % len(other)]) for i in range(max(len(one), len(other)))] if one and other else []
    )


def _join(units: Sequence[Unit], pairs: Sequence[Pair]) -> list[Unit]:
    """Merge the units of each pair."""
    unit_of = {one.name: unit for unit in units for one in unit}
    for first, second in pairs:
        if unit_of[first] is not unit_of[second]:
            merged = (*unit_of[first], *unit_of[second])
            unit_of |= {one.name: merged for one in merged}
    return list({id(unit): unit for unit in unit_of.values()}.values())
