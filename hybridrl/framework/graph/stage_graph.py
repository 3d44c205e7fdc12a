"""The graph of a step: data flow, dependencies and placement of its stages.

    placements = {"actor": RolePlacement("global_pool", 8, "actor+critic"), ...}
    graph = stage_graph([spec_of(fn) for fn in trainer.stages()], placements)
    to_text(graph), to_picture(graph, title="a job")

`hybridrl job graph` builds it without starting anything. All facts come from the stages' specs (`StageSpec`), so the
graph includes stages that the user adds.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from hybridrl.driver.text_table import text_table
from hybridrl.errors import ConfigError
from hybridrl.framework.graph.drawing import Box, Line, to_svg
from hybridrl.framework.stage import StageSpec

DRIVER = "driver"  # shown as the role of stages that run in the driver
PALETTE = (
    "#9ecae9",
    "#f6c177",
    "#a6d9a0",
    "#d8b4e2",
    "#f2a6a0",
    "#a8dcd9",
    "#e6d98a",
)  # colours of pools, in the order of the placements
DRIVER_COLOUR = "#e4e4e4"


@dataclass(frozen=True)
class RolePlacement:
    """Where a role runs.

    Attributes:
        pool: Name of its resource pool.
        num_processes: Number of its processes.
        process: Roles that share each of these processes, joined by "+", as in the processes' names.
    """

    pool: str
    num_processes: int
    process: str


@dataclass(frozen=True)
class Edge:
    """`target` waits for `source`, for one of three reasons.

    Attributes:
        columns: Non-empty if `source` wrote columns that `target` reads.
        state: `source` changed state of the role (weights, a cache) that `target` uses.
        next_step: The waiting `target` is that of the next step.

    Without `columns` and `state` it is an edge of order alone.
    """

    source: str
    target: str
    columns: tuple[str, ...] = ()
    state: bool = False
    next_step: bool = False


@dataclass(frozen=True)
class StageGraph:
    """The stages of a step, in order, and the edges between them.

    Attributes:
        placements: Role -> placement, for the roles that occur in the step.
        unwritten: (stage, column) pairs for columns that no earlier stage writes.
    """

    stages: tuple[StageSpec, ...]
    placements: Mapping[str, RolePlacement]
    edges: tuple[Edge, ...]
    unwritten: tuple[tuple[str, str], ...] = ()
    depth: Mapping[str, int] = field(default_factory=dict)  # stage -> length of the longest chain before it

    def edges_into(self, name: str) -> list[Edge]:
        """Return the edges to the stage: what it waits for."""
        return [edge for edge in self.edges if edge.target == name]

    def where(self, spec: StageSpec) -> tuple[str, ...]:
        """Return the pool and the processes of the stage's role; nothing for the driver."""
        if spec.role is None:
            return ()
        return (f"{self.placements[spec.role].pool} x{self.placements[spec.role].num_processes}",)

    def pools(self) -> dict[str, dict[str, int]]:
        """Return, per pool, its processes: the roles that share one -> number of such processes."""
        found: dict[str, dict[str, int]] = {}
        for placement in self.placements.values():
            found.setdefault(placement.pool, {})[placement.process] = placement.num_processes
        return found

    def colour_of(self, spec: StageSpec) -> str:
        """Return the colour of the pool where the stage runs."""
        if spec.role is None:
            return DRIVER_COLOUR
        return PALETTE[list(self.pools()).index(self.placements[spec.role].pool) % len(PALETTE)]


def stage_graph(stages: Iterable[StageSpec], placements: Mapping[str, RolePlacement]) -> StageGraph:
    """Return the graph of these stages.

    A column comes from the stage that wrote it last. The state of a role comes from its last stage that is not pure, if
    necessary in the previous step. State that a pure stage uses is not changed before that stage has ended. Stages that
    are not pure run in their order. Edges of state and order that follow from other edges are left out.

    Raises:
        ConfigError: Two stages have the same name, or a role has no placement.
    """
    stages = tuple(stages)
    _check_stages(stages, placements)
    data, unwritten = _data_edges(stages)
    state = _state_edges(stages, data)
    edges = (*data, *state, *_order_edges(stages, (*data, *state)))
    used = {spec.role for spec in stages}
    return StageGraph(
        stages,
        {role: placement for role, placement in placements.items() if role in used},
        edges,
        tuple(unwritten),
        _depths(stages, edges),
    )


def _check_stages(stages: Sequence[StageSpec], placements: Mapping[str, RolePlacement]) -> None:
    names = [spec.name for spec in stages]
    for spec in stages:
        if names.count(spec.name) > 1:
            raise ConfigError(
                f"{names.count(spec.name)} stages are called {spec.name!r}; give them different names with @stage(name)"
            )
        if spec.role is not None and spec.role not in placements:
            raise ConfigError(
                f"stage {spec.name!r} runs in role {spec.role!r}, which has no placement; roles that have: "
                f"{', '.join(placements) or 'none'}"
            )


def _data_edges(stages: Sequence[StageSpec]) -> tuple[list[Edge], list[tuple[str, str]]]:
    writer: dict[str, str] = {}
    edges, unwritten = [], []
    for spec in stages:
        by_writer: dict[str, list[str]] = {}
        for column in spec.reads:
            if column in writer:
                by_writer.setdefault(writer[column], []).append(column)
            else:
                unwritten.append((spec.name, column))
        edges += [Edge(source, spec.name, tuple(columns)) for source, columns in by_writer.items()]
        writer |= dict.fromkeys(spec.writes, spec.name)
    return edges, unwritten


def _state_edges(stages: Sequence[StageSpec], data: Sequence[Edge]) -> list[Edge]:
    wanted = []
    for own in _stages_by_role(stages):
        for index, spec in enumerate(own):
            change = _last_change(own, index)
            if change is not None and change is not spec:
                wanted.append(Edge(change.name, spec.name, state=True, next_step=own.index(change) >= index))
    return _not_implied(wanted, data)


def _order_edges(stages: Sequence[StageSpec], existing: Sequence[Edge]) -> list[Edge]:
    once = [spec.name for spec in stages if not spec.pure]
    wanted = [Edge(before, after) for before, after in pairwise(once)]
    wanted += [Edge(once[-1], once[0], next_step=True)] if len(once) > 1 else []
    for own in _stages_by_role(stages):
        for index, spec in enumerate(own):
            changes = [(i <= index, i) for i, other in enumerate(own) if not other.pure]
            if spec.pure and changes:
                wraps, change = min(changes)
                wanted.append(Edge(spec.name, own[change].name, next_step=wraps))
    return _not_implied(wanted, existing)


def _stages_by_role(stages: Sequence[StageSpec]) -> list[list[StageSpec]]:
    """Return the stages of each role; stages of the driver belong to no role."""
    roles = dict.fromkeys(spec.role for spec in stages if spec.role is not None)
    return [[spec for spec in stages if spec.role == role] for role in roles]


def _last_change(stages: Sequence[StageSpec], index: int) -> StageSpec | None:
    """Return the stage that last changed the state used by stage `index`.

    It is an earlier stage of the step, or else the last one of the previous step.
    """
    changes = [spec for spec in (*stages[index:], *stages[:index]) if not spec.pure]
    return changes[-1] if changes else None


def _not_implied(wanted: Iterable[Edge], existing: Sequence[Edge]) -> list[Edge]:
    """Return the wanted edges that follow neither from each other nor from the existing ones."""
    kept = list(dict.fromkeys(wanted))
    for edge in tuple(kept):
        others = [other for other in (*existing, *kept) if other != edge]
        if (edge.target, edge.next_step) in _reachable(edge.source, others):
            kept.remove(edge)
    return kept


def _reachable(source: str, edges: Sequence[Edge]) -> set[tuple[str, bool]]:
    """Return what waits for `source`, as (stage, whether it is the next step's)."""
    found: set[tuple[str, bool]] = set()
    open_ends = [(source, False)]
    while open_ends:
        name, next_step = open_ends.pop()
        for edge in edges:
            reached = (edge.target, next_step or edge.next_step)
            if edge.source == name and not (next_step and edge.next_step) and reached not in found:
                found.add(reached)
                open_ends.append(reached)
    return found


def _depths(stages: Sequence[StageSpec], edges: Sequence[Edge]) -> dict[str, int]:
    depth: dict[str, int] = {}
    for spec in stages:  # in this order every edge within the step points forward
        before = [depth[edge.source] for edge in edges if edge.target == spec.name and not edge.next_step]
        depth[spec.name] = 1 + max(before, default=-1)
    return depth


# -- as text

HEADER = ("stage", "role", "pool", "runs", "reads, from which stage", "writes")
READS_WIDTH, WRITES_WIDTH = 52, 34


def to_text(graph: StageGraph) -> str:
    """Return the graph as a table for a terminal: the stages in order, then the pools."""
    rows = [cells for spec in graph.stages for cells in zip_longest(*_cells(graph, spec), fillvalue="")]
    unwritten = [f"{stage} reads {column}, which no stage before it writes" for stage, column in graph.unwritten]
    return "\n".join([*text_table(HEADER, rows), "", *_pool_lines(graph), *unwritten]) + "\n"


def _cells(graph: StageGraph, spec: StageSpec) -> list[list[str]]:
    reads = [line for edge in graph.edges_into(spec.name) for line in _wrapped(_edge_text(edge), READS_WIDTH)]
    return [
        [spec.name],
        [spec.role or DRIVER],
        list(graph.where(spec) or ("-",)),
        ["pure" if spec.pure else "once"],
        reads,
        _wrapped(", ".join(spec.writes), WRITES_WIDTH),
    ]


def _edge_text(edge: Edge) -> str:
    if edge.columns:
        return f"{edge.source}: {', '.join(edge.columns)}"
    source = f"the last step's {edge.source}" if edge.next_step else edge.source
    return f"(state changed by {source})" if edge.state else f"(after {source})"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False)


def _pool_lines(graph: StageGraph) -> list[str]:
    lines = []
    for pool, processes in graph.pools().items():
        what = ", ".join(f"{count} of {roles}" for roles, count in processes.items())
        lines.append(f"{pool}: {what} (roles joined by + share a process)" if "+" in what else f"{pool}: {what}")
    return lines


# -- as a picture

NOTES = (
    "round: pure, may be run again;  square and heavy: runs once per step;  on one ground: could run at the same time",
    "dot: writes;  arrow: reads;  dashed: state of a role;  dotted: order alone",
)


def to_picture(graph: StageGraph, *, title: str = "") -> str:
    """Return the graph as SVG. A stage stands to the right of all stages that it waits for."""
    boxes = [_box(graph, spec) for spec in sorted(graph.stages, key=lambda spec: graph.depth[spec.name])]
    return to_svg(boxes, picture_lines(graph), title=title, notes=[*_pool_lines(graph), *NOTES])


def _box(graph: StageGraph, spec: StageSpec) -> Box:
    lines, shaded = (spec.role or DRIVER, *graph.where(spec)), graph.depth[spec.name] % 2 == 1
    return Box(spec.name, lines, graph.colour_of(spec), heavy=not spec.pure, shaded=shaded)


def picture_lines(graph: StageGraph) -> list[Line]:
    """Return the lines from top to bottom: columns by writer, then state, then order.

    Columns with the same writer and the same readers are one line; unread ones have no arrow.
    """
    lines = []
    for spec in graph.stages:
        grouped: dict[tuple[str, ...], list[str]] = {}
        for column in spec.writes:
            readers = tuple(edge.target for edge in graph.edges if edge.source == spec.name and column in edge.columns)
            grouped.setdefault(readers, []).append(column)
        most_first = sorted(grouped.items(), key=lambda x: -len(x[0]))
        lines += [Line(spec.name, readers, ", ".join(columns)) for readers, columns in most_first]
    role_of = {spec.name: spec.role for spec in graph.stages}
    others: dict[tuple[bool, bool, str], list[str]] = {}
    for edge in graph.edges:
        if not edge.columns:
            others.setdefault((not edge.state, edge.next_step, edge.source), []).append(edge.target)
    for (is_order, next_step, source), targets in sorted(others.items(), key=lambda x: x[0][:2]):
        label = ("after" if is_order else f"state of {role_of[source]}") + (" (next step)" if next_step else "")
        lines.append(Line(source, tuple(targets), label, "order" if is_order else "state"))
    return lines
