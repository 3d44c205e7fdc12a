"""The graph of a job with own roles: its roles, their processes, and what flows between them.

`hybridrl job graph FILE` makes one from a job's description and its plan, without starting anything. It is drawn as
text, in Graphviz's DOT language, or as a picture with the roles in a row: solid arrows below feed data, dashed ones
above give weights, dotted ones are the trainer's calls. Needs matplotlib for pictures, not Graphviz.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.framework.graph.drawing import LINE, MARGIN, ORDER, STATE
from hybridrl.framework.graph.stage_graph import DRIVER_COLOUR, PALETTE
from hybridrl.system.atomic_write import replaced_file

HEADER = ("role", "processes", "pool", "runs", "feeds", "gives its weights to")
# All lengths are in inches.
BOX_WIDTH, BOX_HEIGHT, GAP = 1.7, 0.72, 0.7
CHARACTER = 0.075  # width per character of the longest line in a box
ARC = 0.45  # height of an arrow between neighbours; of others, times the square root of their distance
LEAVES_AT, ARRIVES_AT = 0.3, 0.12  # from the middle of a box, so that arrows do not meet in one point
TITLE_HEIGHT, LEGEND_HEIGHT, TRAINER_GAP = 0.3, 0.35, 0.7


@dataclass(frozen=True)
class RoleNode:
    """A role of a job.

    Attributes:
        num_processes: Number of its processes.
        pool: Roles of one pool share devices. "" for the trainer.
        entry: What its processes run.
    """

    name: str
    num_processes: int
    pool: str
    entry: str


@dataclass(frozen=True)
class RoleEdge:
    """Data ("feeds") or weights ("weights") that go from one role to another. weight: the amount, in any unit."""

    kind: str
    source: str
    target: str
    weight: float = 1.0


@dataclass(frozen=True)
class RoleGraph:
    """The roles of a job in their order. trainer: the role that calls the others, None if there is none."""

    roles: tuple[RoleNode, ...]
    edges: tuple[RoleEdge, ...]
    trainer: RoleNode | None = None

    @property
    def nodes(self) -> tuple[RoleNode, ...]:
        return self.roles if self.trainer is None else (self.trainer, *self.roles)

    def colour_of(self, node: RoleNode) -> str:
        pools = list(dict.fromkeys(role.pool for role in self.roles))
        return PALETTE[pools.index(node.pool) % len(PALETTE)] if node.pool in pools else DRIVER_COLOUR

    def targets(self, role: str, kind: str) -> list[str]:
        """Return where data or weights of a role go, each with its amount if it is not 1."""
        edges = [edge for edge in self.edges if (edge.source, edge.kind) == (role, kind)]
        return [edge.target if edge.weight == 1 else f"{edge.target} ({edge.weight:g})" for edge in edges]


# -- as text


def to_text(graph: RoleGraph) -> str:
    """Return the graph as a table for a terminal, a role per line."""
    rows = [HEADER, *(_cells(graph, node) for node in graph.nodes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = [rows[0], tuple("-" * width for width in widths), *rows[1:]]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def _cells(graph: RoleGraph, node: RoleNode) -> tuple[str, ...]:
    flows = (", ".join(graph.targets(node.name, kind)) for kind in ("feeds", "weights"))
    return (node.name, str(node.num_processes), node.pool or "-", node.entry, *flows)


# -- as Graphviz DOT


def to_dot(graph: RoleGraph) -> str:
    """Return the graph in Graphviz's DOT language. Weights are dashed, the trainer's calls dotted."""
    lines = ["digraph job {", "  rankdir=LR; nodesep=0.4; ranksep=0.8;", '  node [shape=box, fontname="Helvetica"];']
    for node in graph.nodes:
        label = _quoted(f"{node.name} x{node.num_processes}\n{node.entry}")
        lines.append(f'  {_quoted(node.name)} [label={label}, style=filled, fillcolor="{graph.colour_of(node)}"];')
    if graph.trainer is not None:
        trainer = _quoted(graph.trainer.name)
        lines += [f"  {trainer} -> {_quoted(role.name)} [style=dotted];" for role in graph.roles]
    for edge in graph.edges:
        style = "style=dashed, penwidth=1.6" if edge.kind == "weights" else "style=solid"
        label = _edge_label(edge)
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)} [{style}, label={_quoted(label)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _edge_label(edge: RoleEdge) -> str:
    return edge.kind if edge.weight == 1 else f"{edge.kind} ({edge.weight:g})"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


# -- as a picture


def draw_roles(graph: RoleGraph, path: str | Path, *, title: str = "", picture: str = "png") -> None:
    """Write the picture to `path`, atomically.

    Args:
        graph: The graph.
        path: Output file.
        title: Heading of the picture.
        picture: "png", or "svg" with searchable text.
    """
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which looks for a window system

    box = max([BOX_WIDTH, *(CHARACTER * len(text) for node in graph.nodes for text in _box_lines(node))])
    arc = max([0.0, *(_arc_height(graph, edge) for edge in graph.edges)])
    width = 2 * MARGIN + len(graph.roles) * (box + GAP) - GAP
    above = TITLE_HEIGHT + (BOX_HEIGHT + TRAINER_GAP if graph.trainer else 0.0) + arc
    height = 2 * MARGIN + above + BOX_HEIGHT + arc + LEGEND_HEIGHT
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))  # origin in the upper left corner
    axes.axis("off")
    axes.text(MARGIN, MARGIN, title, va="top", fontsize=11, fontweight="bold")
    top = MARGIN + above
    x = {role.name: MARGIN + box / 2 + i * (box + GAP) for i, role in enumerate(graph.roles)}
    if graph.trainer is not None:
        trainer_top = MARGIN + TITLE_HEIGHT
        for role in graph.roles:
            _arrow(axes, (width / 2, trainer_top + BOX_HEIGHT), (x[role.name], top), color=ORDER, linestyle=":")
        _box(axes, graph, graph.trainer, (width / 2, trainer_top), box)
    for role in graph.roles:
        _box(axes, graph, role, (x[role.name], top), box)
    for edge in graph.edges:
        _edge(axes, edge, x, tops=(top, top + BOX_HEIGHT), height=_arc_height(graph, edge))
    words = "solid: feeds data;  dashed: gives its weights;  dotted: the trainer's calls;  one colour: shared devices"
    axes.text(MARGIN, height - MARGIN, words, va="bottom", fontsize=7.5)
    with replaced_file(path) as temporary, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hybridrl"}):
        figure.savefig(temporary, format=picture, dpi=130, metadata={"Date": None} if picture == "svg" else None)


def _box_lines(node: RoleNode) -> tuple[str, ...]:
    return (f"{node.name} x{node.num_processes}", node.entry, node.pool)


def _arc_height(graph: RoleGraph, edge: RoleEdge) -> float:
    names = [role.name for role in graph.roles]
    return ARC * max(1, abs(names.index(edge.source) - names.index(edge.target))) ** 0.5


def _box(axes: Any, graph: RoleGraph, node: RoleNode, at: tuple[float, float], width: float) -> None:
    """Draw a role's box; `at` is the middle of its upper edge."""
    from matplotlib.patches import FancyBboxPatch

    x, top = at
    style = f"round,pad=0,rounding_size={BOX_HEIGHT / 6:.3f}"
    colour = graph.colour_of(node)
    corner = (x - width / 2, top)
    axes.add_patch(
        FancyBboxPatch(corner, width, BOX_HEIGHT, boxstyle=style, facecolor=colour, edgecolor="black", zorder=3)
    )
    for down, text, size in zip((0.2, 0.42, 0.6), _box_lines(node), (9, 7, 7), strict=True):
        weight = "bold" if size == 9 else "normal"
        axes.text(x, top + down, text, ha="center", va="center", fontsize=size, fontweight=weight, zorder=4)


def _edge(axes: Any, edge: RoleEdge, x: Mapping[str, float], *, tops: Sequence[float], height: float) -> None:
    """Draw data below the boxes, and weights above them."""
    weights = edge.kind == "weights"
    y, up = (tops[0], -1) if weights else (tops[1], 1)
    forward = 1 if x[edge.source] <= x[edge.target] else -1
    start, end = x[edge.source] + forward * LEAVES_AT, x[edge.target] - forward * ARRIVES_AT
    path = [(start, y), (start, y + up * height), (end, y + up * height), (end, y)]
    colour = STATE if weights else LINE
    _curve(axes, path, color=colour, linestyle=(0, (5, 2)) if weights else "-")
    middle = y + up * 0.75 * height  # of the curve
    axes.text(
        (start + end) / 2,
        middle,
        _edge_label(edge),
        ha="center",
        va="center",
        fontsize=7.5,
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        zorder=2,
    )


def _curve(axes: Any, points: Sequence[tuple[float, float]], **line: Any) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    curve = Curve(list(points), [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    axes.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=9, linewidth=1.2, zorder=1, **line))


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **line: Any) -> None:
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, shrinkA=0, shrinkB=0, zorder=0, **line)
    )
