"""The graph of a job with own roles: its roles, their processes, and what flows between them.

`hybridrl job graph FILE` makes one from a job's description and its plan, without starting anything. It is shown as
text or as a picture.
"""

from dataclasses import dataclass

from hybridrl.driver.text_table import text_table
from hybridrl.framework.graph.drawing import Box, Line, to_svg
from hybridrl.framework.graph.stage_graph import DRIVER_COLOUR, PALETTE

HEADER = ("role", "processes", "pool", "runs", "feeds", "gives its weights to")
KINDS = {"feeds": "data", "weights": "state"}  # kind of an edge -> kind of its line in a picture
NOTES = ("solid: feeds data;  dashed: gives its weights;  dotted: the trainer's calls;  one colour: shared devices",)


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

    @property
    def label(self) -> str:
        return self.kind if self.weight == 1 else f"{self.kind} ({self.weight:g})"


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
    return "".join(f"{line}\n" for line in text_table(HEADER, [_cells(graph, node) for node in graph.nodes]))


def _cells(graph: RoleGraph, node: RoleNode) -> tuple[str, ...]:
    flows = (", ".join(graph.targets(node.name, kind)) for kind in ("feeds", "weights"))
    return (node.name, str(node.num_processes), node.pool or "-", node.entry, *flows)


# -- as a picture


def to_picture(graph: RoleGraph, *, title: str = "") -> str:
    """Return the graph as SVG, with the roles in a row."""
    names = {node.name: f"{node.name} x{node.num_processes}" for node in graph.nodes}
    boxes = [Box(names[node.name], (node.entry, node.pool), graph.colour_of(node)) for node in graph.nodes]
    called = tuple(names[role.name] for role in graph.roles)
    calls = [] if graph.trainer is None else [Line(names[graph.trainer.name], called, "calls", "order")]
    flows = [Line(names[edge.source], (names[edge.target],), edge.label, KINDS[edge.kind]) for edge in graph.edges]
    return to_svg(boxes, [*calls, *flows], title=title, notes=NOTES)
