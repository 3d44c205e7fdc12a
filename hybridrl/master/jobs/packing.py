"""Heaviest edges on one machine: which reservations of a job go together, decided for the machines of a cluster. Pure;
nothing is asked.

Edges between roles are added up to edges between their pools. From the heaviest to the lightest, the nodes of both ends
are put on one machine wherever all of the job still finds room: what is feasible without an edge stays feasible with
it. Ray is then told which machine each reservation would rather have; one that somebody else has taken meanwhile is no
reason not to start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridrl.master.jobs.spec import JobSpec
from hybridrl.single_controller.placement.feasibility import Machine, Unit, assign
from hybridrl.single_controller.placement.placement_groups import NODE_LABEL
from hybridrl.single_controller.placement.plan import Plan, Reservation

# Searches for one job. An edge between two pools costs one, or one for each pair of their nodes where not all of them
# fit.
MOST_TRIALS = 200
Pair = tuple[str, str]


def pack_plan(plan: Plan, spec: JobSpec, machines: Sequence[Machine]) -> Plan:
    """Return the plan with the machine that each reservation would rather have, so that roles joined by heavy edges
    share one.

    The plan is returned as it is where nothing is joined, and where a machine is all there is.
    """
    together = pack(plan.reservations(), pool_edges(spec), machines) if len(machines) > 1 else {}
    if not together:
        return plan
    rather = {name: machines[number].labels.get(NODE_LABEL, "") for name, number in together.items()}

    def with_machine(one: Reservation) -> Reservation:
        return replace(one, rather_on=rather.get(one.name, ""))

    pools = tuple(replace(pool, reservations=tuple(map(with_machine, pool.reservations))) for pool in plan.pools)
    driver = plan.driver and replace(plan.driver, reservation=with_machine(plan.driver.reservation))
    return replace(plan, pools=pools, driver=driver)


def pool_edges(spec: JobSpec) -> dict[Pair, float]:
    """Return how much flows between each two pools, in both directions and of every kind together, the
    heaviest first.
    """
    pool_of = {role.name: role.pool for role in spec.roles}
    edges: dict[Pair, float] = {}
    for edge in spec.edges:
        first, second = sorted((pool_of[edge.source], pool_of[edge.target]))
        if first != second and edge.weight:
            edges[first, second] = edges.get((first, second), 0.0) + edge.weight
    return dict(sorted(edges.items(), key=lambda item: -item[1]))


def pack(
    reservations: Sequence[Reservation], edges: Mapping[Pair, float], machines: Sequence[Machine]
) -> dict[str, int]:
    """Return the machine of every reservation, by its number. Empty where no two can be put together.

    edges: between pools, the heaviest first. Every reservation has a machine that can hold it beside the others;
    `spread` is kept wherever the machines allow it.
    """
    units = _alone(reservations, machines)
    places, trials, joined = assign(units, machines), 0, False
    if places is None:
        return {}
    for first, second in edges:
        pairs = _pairs(units, first, second)
        for attempt in ([pairs] if len(pairs) > 1 else []) + [[pair] for pair in pairs]:
            if trials == MOST_TRIALS:
                break
            trials += 1
            candidate = _join(units, attempt)
            found = assign(candidate, machines)
            if found is not None:
                units, places, joined = candidate, found, True
            if found is not None and len(attempt) == len(pairs):
                break
    return {one.name: place for unit, place in zip(units, places, strict=True) for one in unit} if joined else {}


def _alone(reservations: Sequence[Reservation], machines: Sequence[Machine]) -> list[Unit]:
    """Every reservation by itself; those that shall be spread keep apart if there are machines enough."""
    wished = [(replace(one, apart_from=(*one.apart_from, one.pool)) if one.spread else one,) for one in reservations]
    return wished if assign(wished, machines) is not None else [(one,) for one in reservations]


def _pairs(units: Sequence[Unit], first: str, second: str) -> list[Pair]:
    """The nodes of two pools that belong together, by name: the first with the first, and around again for the one that
    has fewer.
    """
    names = {pool: [one.name for unit in units for one in unit if one.pool == pool] for pool in (first, second)}
    one, other = (sorted(names[pool], key=_node) for pool in (first, second))
    return (
        [(one[i % len(one)], other[i % len(other)]) for i in range(max(len(one), len(other)))] if one and other else []
    )


def _node(name: str) -> int:
    return int(name.rpartition("-")[2])


def _join(units: Sequence[Unit], pairs: Sequence[Pair]) -> list[Unit]:
    """Put the units of each pair together."""
    unit_of = {one.name: unit for unit in units for one in unit}
    for first, second in pairs:
        if unit_of[first] is not unit_of[second]:
            whole = (*unit_of[first], *unit_of[second])
            unit_of |= {one.name: whole for one in whole}
    return list({id(unit): unit for unit in unit_of.values()}.values())
