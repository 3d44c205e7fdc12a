"""Draw a `StageGraph` as a picture: stages in a row, edges as horizontal lines below them.

`hybridrl job graph --output` calls `draw_graph`. A stage stands to the right of all stages that it waits for; stages on
the same ground could run concurrently. Each line has a dot at the stage that writes its columns and an arrow at every
stage that reads them. Every name is written once, and no two lines cross. Lines of columns come first, then state and
order; those to the next step come last and point back. Needs matplotlib, not Graphviz.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.framework.graph.stage_graph import DRIVER, Edge, StageGraph
from hybridrl.framework.stage import StageSpec
from hybridrl.system.atomic_write import replaced_file

# All lengths are in inches.
SLOT, GAP, BOX_HEIGHT = 1.42, 0.14, 0.72  # SLOT is a minimum: long names widen all slots
CHARACTER, SMALL_CHARACTER = 0.086, 0.066  # width per character: stage name in bold; role or pool
ROW, TEXT_LINE, LABEL_WIDTH = 0.30, 0.13, 58
MARGIN, LEGEND_HEIGHT = 0.25, 0.75
BAND, LINE, PALE = "#f5f5f5", "#34495e", "#9aa4ad"
STATE, ORDER = "#b03a2e", "#7f8c8d"


@dataclass(frozen=True)
class DrawingRow:
    """A line of the picture, from one stage to others.

    Attributes:
        kind: "columns", "state" or "order".
    """

    source: str
    targets: tuple[str, ...]
    label: str
    kind: str = "columns"
    next_step: bool = False

    @property
    def lines(self) -> list[str]:
        return textwrap.wrap(self.label, LABEL_WIDTH, break_long_words=False)


def draw_graph(graph: StageGraph, path: str | Path, *, title: str = "", picture: str = "png") -> None:
    """Write the picture to `path`, atomically.

    Args:
        graph: The graph.
        path: Output file.
        title: Heading of the picture.
        picture: "png", or "svg" with searchable text.
    """
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which looks for a window system

    path = Path(path)
    rows = drawing_rows(graph)
    slots = {spec.name: i for i, spec in enumerate(sorted(graph.stages, key=lambda spec: graph.depth[spec.name]))}
    heights = [ROW + TEXT_LINE * (len(row.lines) - 1) for row in rows]
    slot = slot_width(graph)
    width, height = (
        2 * MARGIN + slot * len(slots),
        2 * MARGIN + BOX_HEIGHT + sum(heights) + 0.55 + LEGEND_HEIGHT + (0.3 if title else 0),
    )
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))  # origin in the upper left corner
    axes.axis("off")
    top = MARGIN
    if title:
        axes.text(MARGIN, top, title, va="top", fontsize=11, fontweight="bold")
        top += 0.3
    drawing = GraphDrawing(graph, slots, axes, slot=slot, top=top, bottom=height - MARGIN - LEGEND_HEIGHT)
    drawing.draw(rows, heights)
    with replaced_file(path) as temporary, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hybridrl"}):
        figure.savefig(temporary, format=picture, dpi=130, metadata={"Date": None} if picture == "svg" else None)


def slot_width(graph: StageGraph) -> float:
    """Return the width of a stage's slot, in inches, that fits every name in a box."""
    pools = [f"{placement.pool} x{placement.num_processes}" for placement in graph.placements.values()]
    names = [CHARACTER * len(spec.name) for spec in graph.stages]
    return max(
        [
            SLOT,
            *(
                0.1 + GAP + width
                for width in [*names, *(SMALL_CHARACTER * len(text) for text in (*pools, *graph.placements))]
            ),
        ]
    )


def drawing_rows(graph: StageGraph) -> list[DrawingRow]:
    """Return the lines from top to bottom: columns by writer, then state, then order."""
    return [*_column_rows(graph), *_other_rows(graph, state=True), *_other_rows(graph, state=False)]


def _column_rows(graph: StageGraph) -> list[DrawingRow]:
    """Return one row per stage and set of readers; unread columns get a row without arrows."""
    rows = []
    for spec in graph.stages:
        grouped: dict[tuple[str, ...], list[str]] = {}
        for column in spec.writes:
            readers = tuple(edge.target for edge in graph.edges if edge.source == spec.name and column in edge.columns)
            grouped.setdefault(readers, []).append(column)
        rows += [
            DrawingRow(spec.name, readers, ", ".join(columns))
            for readers, columns in sorted(grouped.items(), key=lambda x: -len(x[0]))
        ]
    return rows


def _other_rows(graph: StageGraph, *, state: bool) -> list[DrawingRow]:
    grouped: dict[tuple[bool, str], list[str]] = {}
    for edge in graph.edges:
        if not edge.columns and edge.state == state:
            grouped.setdefault((edge.next_step, edge.source), []).append(edge.target)
    return [
        DrawingRow(
            source,
            tuple(targets),
            _edge_label(graph, Edge(source, targets[0], state=state, next_step=next_step)),
            "state" if state else "order",
            next_step,
        )
        for (next_step, source), targets in sorted(grouped.items(), key=lambda x: x[0][0])
    ]


def _edge_label(graph: StageGraph, edge: Edge) -> str:
    role = next(spec.role for spec in graph.stages if spec.name == edge.source)
    what = f"state of {role}" if edge.state else "after"
    return f"{what} (next step)" if edge.next_step else what


@dataclass
class GraphDrawing:
    """A drawing in progress on matplotlib axes.

    Attributes:
        slots: Stage -> its position from the left.
        slot: Width of a slot, in inches.
        top: Upper edge of the boxes, in inches from the top.
        bottom: Lower edge of the lines, in inches from the top.
    """

    graph: StageGraph
    slots: dict[str, int]
    axes: Any
    slot: float
    top: float
    bottom: float

    def x(self, stage: str) -> float:
        return MARGIN + self.slot * (self.slots[stage] + 0.5)

    def draw(self, rows: list[DrawingRow], heights: list[float]) -> None:
        self._bands()
        for spec in self.graph.stages:
            self.axes.plot(
                [self.x(spec.name)] * 2, [self.top + BOX_HEIGHT, self.bottom], color="#d0d4d8", linewidth=0.8, zorder=1
            )
            self._box(spec)
        y = self.top + BOX_HEIGHT + 0.15
        for row, height in zip(rows, heights, strict=True):
            y += height
            self._row(row, y)
        self._legend()

    def _bands(self) -> None:
        for spec in self.graph.stages:
            if self.graph.depth[spec.name] % 2:
                left = MARGIN + self.slot * self.slots[spec.name]
                self.axes.fill_between(
                    [left, left + self.slot], self.top - 0.1, self.bottom, color=BAND, linewidth=0, zorder=0
                )

    def _box(self, spec: StageSpec) -> None:
        placement = self.graph.placement_of(spec)
        width = self.slot - GAP
        self._frame(
            self.x(spec.name) - width / 2,
            self.top,
            (width, BOX_HEIGHT),
            pool=None if placement is None else placement.pool,
            pure=spec.pure,
        )
        where = [(0.46, spec.role or DRIVER)] + (
            [] if placement is None else [(0.62, f"{placement.pool} x{placement.num_processes}")]
        )
        self.axes.text(
            self.x(spec.name),
            self.top + 0.22,
            spec.name,
            ha="center",
            va="center",
            fontsize=9,
            fontweight="bold",
            zorder=4,
        )
        for down, text in where:
            self.axes.text(self.x(spec.name), self.top + down, text, ha="center", va="center", fontsize=7, zorder=4)

    def _frame(self, left: float, top: float, size: tuple[float, float], *, pool: str | None, pure: bool) -> None:
        """Draw a box in the pool's colour.

        A pure stage has a rounded, thin frame; one that runs once has a square, heavy one.
        """
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={min(size) / 5:.3f}" if pure else "square,pad=0"
        colour = self.graph.colour_of(pool)
        self.axes.add_patch(
            FancyBboxPatch(
                (left, top),
                *size,
                boxstyle=style,
                facecolor=colour,
                edgecolor="black",
                linewidth=0.7 if pure else 2,
                zorder=3,
            )
        )

    def _row(self, row: DrawingRow, y: float) -> None:
        colour, dashes = {"columns": (LINE, "-"), "state": (STATE, (0, (5, 2))), "order": (ORDER, (0, (1, 1.5)))}[
            row.kind
        ]
        start, ends = self.x(row.source), [self.x(target) for target in row.targets]
        if ends:
            extent = [min([start, *ends]), max([start, *ends])]
            self.axes.plot(extent, [y, y], color=colour, linestyle=dashes, linewidth=1.1, zorder=2)
        self.axes.plot([start], [y], "o", color=colour if ends else PALE, markersize=4.5, zorder=3)
        for end in ends:
            self.axes.plot(
                [end + (0.045 if end < start else -0.045)],
                [y],
                "<" if end < start else ">",
                color=colour,
                markersize=5.5,
                zorder=3,
            )
        self._label(row, y, colour=colour if ends else PALE)

    def _label(self, row: DrawingRow, y: float, *, colour: str) -> None:
        """Write the label above the start of its line.

        It stands left of the start where the line goes back or where the picture would end.
        """
        back = row.next_step or self.slots[row.source] >= len(self.slots) - 3
        x = self.x(row.source) + (-0.08 if back else 0.08)
        text = "\n".join(row.lines)
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4}
        self.axes.text(
            x,
            y - 0.045,
            text,
            ha="right" if back else "left",
            va="bottom",
            fontsize=7.5,
            color=colour,
            zorder=5,
            bbox=ground,
        )

    def _legend(self) -> None:
        x, y = MARGIN, self.bottom + 0.18
        entries = [(None, f"{DRIVER}")] + [(pool, f"{pool}: {_processes(p)}") for pool, p in self.graph.pools().items()]
        for pool, text in entries:
            self._frame(x, y, (0.22, 0.16), pool=pool, pure=True)
            self.axes.text(x + 0.3, y + 0.085, text, va="center", fontsize=7.5)
            x += 0.55 + SMALL_CHARACTER * len(text)
        x, y = MARGIN, y + 0.3
        for pure, text in ((True, "pure: may be run again"), (False, "runs exactly once per step")):
            self._frame(x, y, (0.22, 0.16), pool=None, pure=pure)
            self.axes.text(x + 0.3, y + 0.085, text, va="center", fontsize=7.5)
            x += 0.55 + SMALL_CHARACTER * len(text)
        words = "dot: writes;  arrow: reads;  dashed: state of a role;  dotted: order alone"
        self.axes.text(x, y + 0.085, words, va="center", fontsize=7.5)


def _processes(processes: dict[str, int]) -> str:
    return ", ".join(f"{count} of {roles}" for roles, count in processes.items())
