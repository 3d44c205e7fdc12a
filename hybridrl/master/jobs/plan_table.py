"""A `Plan` as a table for a terminal."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from hybridrl.master.jobs.spec import EdgeSpec
from hybridrl.single_controller.placement.feasibility import in_words
from hybridrl.single_controller.placement.plan import Plan, PoolPlan, ProcessPlan, Reservation

GROUPS = ("placement group", "bundles", "on")
PROCESSES = ("processes", "local rank", "placement group", "bundle", "each takes", "environment")


def plan_table(plan: Plan, edges: Sequence[EdgeSpec] = ()) -> str:
    """Return the plan's placement groups, then its processes, a line for those of one role in one placement group; then
    what flows.
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
    return (
        "\n".join(
            [title, "", *_table(GROUPS, groups), "", *_table(PROCESSES, processes), *([""] if flows else []), *flows]
        )
        + "\n"
    )


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
    for node, same in groupby(ranks, key=lambda rank: process.slots[rank][0]):
        here = list(same)
        yield [
            f"{process.label} {_ranges(here)} of {len(ranks)}",
            _ranges(range(len(here))),
            pool.reservations[node].name.removeprefix(f"{plan.job}/"),
            _ranges(process.slots[rank][1] for rank in here),
            _amounts(process.resources),
            _environment({**plan.worker_env, **process.environment}),
        ]


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, runs as first-last: 0-3,0-1."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(in_words(name, amount) for name, amount in resources.items())


def _environment(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
