"""Format a `Plan` as tables for a terminal.

Used by dry runs and by `hybridrl job graph`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from hybridrl.driver.text_table import text_table
from hybridrl.master.plan.spec import EdgeSpec
from hybridrl.single_controller.placement.feasibility import format_amount
from hybridrl.single_controller.placement.plan import Plan, PoolPlan, ProcessPlan, Reservation

GROUPS = ("placement group", "bundles", "on")
PROCESSES = ("processes", "local rank", "placement group", "bundle", "each takes", "environment")


def plan_table(plan: Plan, edges: Sequence[EdgeSpec] = ()) -> str:
    """Return the plan as text: placement groups, processes, and edges.

    The processes of one role in one placement group share a line.
    """
    used = {process.pool for process in plan.processes}
    groups = [_group_row(one, pool, plan.job) for pool in plan.pools if pool.name in used for one in pool.reservations]
    processes = [row for process in plan.processes for row in _process_rows(plan, process)]
    if plan.driver is not None:
        [bundle] = plan.driver.reservation.bundles
        processes.insert(0, [plan.driver.role, "-", "-", "-", _amounts(bundle), _environment(plan.driver.environment)])
    title = f"{plan.job}: {len(groups)} placement groups, {len(plan.workers()) + bool(plan.driver)} processes"
    flows = [
        f"{edge.source} {'feeds' if edge.kind == 'feeds' else 'gives its weights to'} {edge.target}" for edge in edges
    ]
    tables = [title, "", *text_table(GROUPS, groups), "", *text_table(PROCESSES, processes)]
    return "\n".join([*tables, *([""] if flows else []), *flows]) + "\n"


def _group_row(one: Reservation, pool: PoolPlan, job: str) -> list[str]:
    bundles = [f"{len(list(same))} x ({text})" for text, same in groupby(_amounts(bundle) for bundle in one.bundles)]
    return [one.name.removeprefix(f"{job}/"), ", ".join(bundles), _machine(one, pool.strategy)]


def _machine(one: Reservation, strategy: str) -> str:
    alone = {"spread": ["a machine of its own, if there are enough"], "strict_spread": ["a machine of its own"]}.get(
        strategy, []
    )
    apart = [f"apart from {other}" for other in one.apart_from if other != one.pool]
    return ", ".join([*alone, *apart, *(f"{key}={value}" for key, value in one.labels.items())]) or "any machine"


def _process_rows(plan: Plan, process: ProcessPlan) -> Iterator[list[str]]:
    pool: PoolPlan = plan.pool(process.pool)
    ranks = range(len(process.slots))
    for node, group in groupby(ranks, key=lambda rank: process.slots[rank][0]):
        on_node = list(group)
        yield [
            f"{process.label} {_ranges(on_node)} of {len(ranks)}",
            _ranges(range(len(on_node))),
            pool.reservations[node].name.removeprefix(f"{plan.job}/"),
            _ranges(process.slots[rank][1] for rank in on_node),
            _amounts(process.resources),
            _environment({**plan.worker_env, **process.environment}),
        ]


def _ranges(numbers: Iterable[int]) -> str:
    """Format numbers in their order, with ranges: 0-3,0-1."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(format_amount(name, amount) for name, amount in resources.items())


def _environment(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())
