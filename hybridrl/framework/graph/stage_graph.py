"""The step as a graph: which stage hands which columns to whom, what has to wait for what, and where each role works.

    graph = stage_graph([spec_of(fn) for fn in trainer.stages()], {"actor": Place("global_pool", 8, "actor+critic"),
    ...}) to_text(graph)          to_dot(graph)          draw_graph(graph, "graph.png")       # the last one:
    graph_drawing.py

Nothing is known here beyond what stages say about themselves (`StageSpec`), so a stage of the user's own has its place
in the graph too.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hybridrl.errors import ConfigError
from hybridrl.framework.stage import StageSpec

DRIVER = "driver"  # the name in the graph of what the driver does itself
PALETTE = (
    "#9ecae9",
    "#f6c177",
    "#a6d9a0",
    "#d8b4e2",
    "#f2a6a0",
    "#a8dcd9",
    "#e6d98a",
)  # of pools, in the order of the places
DRIVER_COLOUR = "#e4e4e4"


@dataclass(frozen=True)
class Place:
    """Where a role works.

    process: the roles that share each of these processes, joined by "+", as in the processes' names.
    """

    pool: str
    num_processes: int
    process: str


@dataclass(frozen=True)
class Edge:
    """target needs source to be over. Three kinds:

    columns: source wrote what target reads. state: source changed what target's role holds (weights, a cache) and
    target works with. Neither: their order alone. next_step: it is the next step's `target` that waits.
    """

    source: str
    target: str
    columns: tuple[str, ...] = ()
    state: bool = False
    next_step: bool = False


@dataclass(frozen=True)
class StageGraph:
    """stages: in the order of the step.

    places: of every role that works in it. unwritten: (stage, column) that no earlier stage writes.
    """

    stages: tuple[StageSpec, ...]
    places: Mapping[str, Place]
    edges: tuple[Edge, ...]
    unwritten: tuple[tuple[str, str], ...] = ()
    depth: Mapping[str, int] = field(default_factory=dict)  # stage -> stages that have to follow each other before it

    def into(self, name: str) -> list[Edge]:
        """Return what the stage waits for."""
        return [edge for edge in self.edges if edge.target == name]

    def place_of(self, spec: StageSpec) -> Place | None:
        """Return where the stage's role works; None for the driver."""
        return None if spec.role is None else self.places[spec.role]

    def pools(self) -> dict[str, dict[str, int]]:
        """Return, per pool, its processes: the roles in one of them -> how many there are."""
        found: dict[str, dict[str, int]] = {}
        for place in self.places.values():
            found.setdefault(place.pool, {})[place.process] = place.num_processes
        return found

    def colour_of(self, pool: str | None) -> str:
        return DRIVER_COLOUR if pool is None else PALETTE[list(self.pools()).index(pool) % len(PALETTE)]


def stage_graph(stages: Iterable[StageSpec], places: Mapping[str, Place]) -> StageGraph:
    """Return the graph of these stages.

    A column comes from the stage that wrote it last, and what a role holds from its last stage that was not pure, if
    need be of the step before. What a pure stage works with is not changed until it is over, and stages that are not
    pure run in their order. Of state and order only that is said which does not follow from the rest. Raises
    ConfigError for two stages of one name and for a role without a place.
    """
    stages = tuple(stages)
    _check(stages, places)
    data, unwritten = _data_edges(stages)
    state = _state_edges(stages, data)
    edges = (*data, *state, *_order_edges(stages, (*data, *state)))
    used = {spec.role for spec in stages}
    return StageGraph(
        stages,
        {role: place for role, place in places.items() if role in used},
        edges,
        tuple(unwritten),
        _depths(stages, edges),
    )


def _check(stages: Sequence[StageSpec], places: Mapping[str, Place]) -> None:
    names = [spec.name for spec in stages]
    for spec in stages:
        if names.count(spec.name) > 1:
            raise ConfigError(
                f"{names.count(spec.name)} stages are called {spec.name!r}; give them different names with @stage(name)"
            )
        if spec.role is not None and spec.role not in places:
            raise ConfigError(
                f"stage {spec.name!r} is the work of {spec.role!r}, which has no place; placed are "
                f"{', '.join(places) or 'none'}"
            )


def _data_edges(stages: Sequence[StageSpec]) -> tuple[list[Edge], list[tuple[str, str]]]:
    writer: dict[str, str] = {}
    edges, unwritten = [], []
    for spec in stages:
        taken: dict[str, list[str]] = {}
        for column in spec.reads:
            if column in writer:
                taken.setdefault(writer[column], []).append(column)
            else:
                unwritten.append((spec.name, column))
        edges += [Edge(source, spec.name, tuple(columns)) for source, columns in taken.items()]
        writer |= dict.fromkeys(spec.writes, spec.name)
    return edges, unwritten


def _state_edges(stages: Sequence[StageSpec], data: Sequence[Edge]) -> list[Edge]:
    wanted = []
    for own in _by_role(stages):
        for index, spec in enumerate(own):
            change = _last_change(own, index)
            if change is not None and change is not spec:
                wanted.append(Edge(change.name, spec.name, state=True, next_step=own.index(change) >= index))
    return _not_implied(wanted, data)


def _order_edges(stages: Sequence[StageSpec], known: Sequence[Edge]) -> list[Edge]:
    once = [spec.name for spec in stages if not spec.pure]
    wanted = [Edge(before, after) for before, after in pairwise(once)]
    wanted += [Edge(once[-1], once[0], next_step=True)] if len(once) > 1 else []
    for own in _by_role(stages):
        for index, spec in enumerate(own):
            later = [(i <= index, i) for i, other in enumerate(own) if not other.pure]
            if spec.pure and later:
                wraps, change = min(later)
                wanted.append(Edge(spec.name, own[change].name, next_step=wraps))
    return _not_implied(wanted, known)


def _by_role(stages: Sequence[StageSpec]) -> list[list[StageSpec]]:
    """The stages of each role; the driver's are no role's, what it holds is everywhere."""
    roles = dict.fromkeys(spec.role for spec in stages if spec.role is not None)
    return [[spec for spec in stages if spec.role == role] for role in roles]


def _last_change(stages: Sequence[StageSpec], index: int) -> StageSpec | None:
    """The stage that changed last what the one at `index` works with: an earlier one, or else the last of the step
    before.
    """
    changes = [spec for spec in (*stages[index:], *stages[:index]) if not spec.pure]
    return changes[-1] if changes else None


def _not_implied(wanted: Iterable[Edge], known: Sequence[Edge]) -> list[Edge]:
    """The wanted edges, without those that others of them, or known ones, imply."""
    kept = list(dict.fromkeys(wanted))
    for edge in tuple(kept):
        others = [other for other in (*known, *kept) if other != edge]
        if (edge.target, edge.next_step) in _after(edge.source, others):
            kept.remove(edge)
    return kept


def _after(source: str, edges: Sequence[Edge]) -> set[tuple[str, bool]]:
    """Return what has to wait for `source`: (stage, whether it is the next step's)."""
    found: set[tuple[str, bool]] = set()
    open_ends = [(source, False)]
    while open_ends:
        name, later = open_ends.pop()
        for edge in edges:
            reached = (edge.target, later or edge.next_step)
            if edge.source == name and not (later and edge.next_step) and reached not in found:
                found.add(reached)
                open_ends.append(reached)
    return found


def _depths(stages: Sequence[StageSpec], edges: Sequence[Edge]) -> dict[str, int]:
    depth: dict[str, int] = {}
    for spec in stages:  # their order is one in which every edge within the step points forward
        before = [depth[edge.source] for edge in edges if edge.target == spec.name and not edge.next_step]
        depth[spec.name] = 1 + max(before, default=-1)
    return depth


# -- as text

HEADER = ("stage", "role", "pool", "runs", "reads, and from whom", "writes")
READS_WIDTH, WRITES_WIDTH = 52, 34


def to_text(graph: StageGraph) -> str:
    """Return the graph as a table for a terminal: one line or more per stage in the order of the step,
    then the pools.
    """
    rows = [_cells(graph, spec) for spec in graph.stages]
    widths = [
        max(len(line) for cells in ([[title]], *[[row[i]] for row in rows]) for cell in cells for line in cell)
        for i, title in enumerate(HEADER)
    ]
    lines = [_line(HEADER, widths), _line(["-" * width for width in widths], widths)]
    for cells in rows:
        height = max(map(len, cells))
        lines += [_line([cell[i] if i < len(cell) else "" for cell in cells], widths) for i in range(height)]
    return "\n".join([*lines, "", *_pool_lines(graph), *_loose_ends(graph)]) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(graph: StageGraph, spec: StageSpec) -> list[list[str]]:
    place = graph.place_of(spec)
    where = "-" if place is None else f"{place.pool} x{place.num_processes}"
    reads = [line for edge in graph.into(spec.name) for line in _wrapped(_incoming(edge), READS_WIDTH)]
    return [
        [spec.name],
        [spec.role or DRIVER],
        [where],
        ["pure" if spec.pure else "once"],
        reads,
        _wrapped(", ".join(spec.writes), WRITES_WIDTH),
    ]


def _incoming(edge: Edge) -> str:
    if edge.columns:
        return f"{edge.source}: {', '.join(edge.columns)}"
    source = f"the last step's {edge.source}" if edge.next_step else edge.source
    return f"(what {source} changed)" if edge.state else f"(after {source})"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False)


def _pool_lines(graph: StageGraph) -> list[str]:
    lines = []
    for pool, processes in graph.pools().items():
        what = ", ".join(f"{count} of {roles}" for roles, count in processes.items())
        lines.append(f"{pool}: {what} (roles joined by + share a process)" if "+" in what else f"{pool}: {what}")
    return lines


def _loose_ends(graph: StageGraph) -> list[str]:
    return [f"{stage} reads {column}, which no stage before it writes" for stage, column in graph.unwritten]


# -- as Graphviz DOT


def to_dot(graph: StageGraph) -> str:
    """Return the graph in the language of Graphviz.

    Stages that run once have a double border; state is dashed, order dotted.
    """
    lines = ["digraph step {", "  rankdir=LR; nodesep=0.4; ranksep=0.8;", '  node [shape=box, fontname="Helvetica"];']
    lines += ['  edge [fontname="Helvetica", fontsize=9];']
    lines += [f"  {_quoted(spec.name)} [{_node_style(graph, spec)}];" for spec in graph.stages]
    lines += [f"  {_quoted(edge.source)} -> {_quoted(edge.target)} [{_edge_style(edge)}];" for edge in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _node_style(graph: StageGraph, spec: StageSpec) -> str:
    place = graph.place_of(spec)
    where = () if place is None else (f"{place.pool} x{place.num_processes}",)
    label = _quoted("\n".join([spec.name, spec.role or DRIVER, *where]))
    shape = 'style="filled,rounded"' if spec.pure else 'style="filled", peripheries=2'
    return f"label={label}, {shape}, fillcolor={_quoted(graph.colour_of(place and place.pool))}"


def _edge_style(edge: Edge) -> str:
    if edge.columns:
        return f"label={_quoted(chr(10).join(edge.columns))}"
    words = (["state"] if edge.state else []) + (["next step"] if edge.next_step else [])
    line = "style=dashed, penwidth=1.6" if edge.state else "style=dotted"
    return f"{line}, label={_quoted(', '.join(words))}" + (", constraint=false" if edge.next_step else "")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
