"""Check whether nodes can hold a job's reservations, and say what is missing where; choose a smaller pool that fits.

Pure: reserves nothing.

check_feasible(plan.reservations(), nodes)      # raises PlacementError, before anything starts
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.plan import Reservation

# Bin packing is NP-hard. After this many choices the search stops and Ray tries: only what is proven is refused.
MAX_CHOICES = 5_000
# Reservations that share a node.
Unit = tuple[Reservation, ...]
ROUNDING = 1e-6  # tolerance when amounts are summed
MAX_NODES_SHOWN = 4
SELECTOR = re.compile(r"(?P<no>!?)(?:in\((?P<many>[^()]*)\)|(?P<one>[^()!]*))")
UNITS = {"memory": (2**20, "MB memory")}  # unit and its name, of resources that are counted in bytes


@dataclass(frozen=True)
class NodeCapacity:
    """All resources of a node, taken or not, by Ray's names, and its labels."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def labels_match(labels: Mapping[str, str], node: NodeCapacity) -> bool:
    """Return whether a node has these labels; a value is `a`, `!a`, `in(a,b)` or `!in(a,b)`, as for Ray."""
    return all(_matches(wanted, node.labels.get(key)) for key, wanted in labels.items())


def _matches(wanted: str, value: str | None) -> bool:
    found = SELECTOR.fullmatch(wanted)
    if found is None:
        return False
    values = [found["one"]] if found["many"] is None else [name.strip() for name in found["many"].split(",")]
    return (value in values) != bool(found["no"])


def check_feasible(reservations: Sequence[Reservation], nodes: Sequence[NodeCapacity]) -> None:
    """Raise PlacementError if the nodes, otherwise empty, cannot hold all reservations, each on one node."""
    search = _Search(sorted(((one,) for one in reservations), key=_difficulty, reverse=True), nodes)
    search.run()
    if search.stuck_at is not None and search.choices <= MAX_CHOICES:
        raise PlacementError(search.shortage())


def assign_to_nodes(units: Sequence[Unit], nodes: Sequence[NodeCapacity]) -> list[int] | None:
    """Return the index of a node for each unit, None without an assignment.

    The node holds all reservations of the unit.
    """
    order = sorted(range(len(units)), key=lambda number: _difficulty(units[number]), reverse=True)
    search = _Search([units[number] for number in order], nodes)
    search.run()
    if search.stuck_at is not None:
        return None
    assigned = dict(zip(order, search.assigned, strict=True))
    return [assigned[number] for number in range(len(units))]


def _difficulty(unit: Unit) -> tuple[Any, ...]:
    """Return a sort key: greater for units that suit few nodes, then for large ones."""
    need = _sum(unit)
    scarce = sum(amount for name, amount in need.items() if name not in ("CPU", "memory"))
    return any(one.labels for one in unit), scarce, need.get("CPU", 0), sum(len(one.apart_from) for one in unit)


def _sum(unit: Unit) -> dict[str, float]:
    need: dict[str, float] = {}
    for one in unit:
        for name, amount in one.resources.items():
            need[name] = round(need.get(name, 0) + amount, 4)
    return need


class _Search:
    """Depth-first search over units; nodes in order, of nodes in an equal state only the first.

    Attributes:
        assigned: index of the node of each unit, after success.
        stuck_at: the furthest unit without a node; None after success.
        left: resources left on every node; after a failure, at the time of `stuck_at`.
        pools_on: pools with a reservation on every node; after a failure, at the time of `stuck_at`.
    """

    def __init__(self, order: Sequence[Unit], nodes: Sequence[NodeCapacity]) -> None:
        self.order, self.nodes = order, nodes
        self.needs = [_sum(unit) for unit in order]
        self.apart: dict[str, set[str]] = {}
        for one in (one for unit in order for one in unit):
            for other in one.apart_from:
                self.apart.setdefault(one.pool, set()).add(other)
                self.apart.setdefault(other, set()).add(one.pool)
        self.left = [dict(node.resources) for node in nodes]
        self.pools_on: list[list[str]] = [[] for _ in nodes]
        self.choices = 0
        self.assigned: list[int] = []
        self.stuck_at: int | None = None

    def run(self) -> None:
        # A loop, not a recursion: a job may have thousands of reservations.
        open_choices: list[Iterator[int]] = [self._candidates(0)] if self.order else []
        chosen: list[int] = []
        stuck = (-1, self.left, self.pools_on)
        while open_choices and self.choices <= MAX_CHOICES:
            index = len(open_choices) - 1
            if len(chosen) > index:
                self._remove(index, chosen.pop())
            node = next(open_choices[-1], None)
            if node is None:
                if index > stuck[0]:
                    stuck = (index, [dict(left) for left in self.left], [list(pools) for pools in self.pools_on])
                open_choices.pop()
                continue
            self._put(index, node)
            chosen.append(node)
            if len(chosen) == len(self.order):
                self.assigned = chosen
                return
            open_choices.append(self._candidates(index + 1))
        if self.order:
            self.stuck_at, self.left, self.pools_on = stuck

    def _candidates(self, index: int) -> Iterator[int]:
        # Units with labels come first, so labels matter only while the next unit has some.
        labels_matter = any(one.labels for unit in self.order[index + 1 : index + 2] for one in unit)
        seen = set()
        for number, node in enumerate(self.nodes):
            if not self._fits(index, number):
                continue
            labels = tuple(sorted(node.labels.items())) if labels_matter else ()
            state = (
                tuple(sorted(self.left[number].items())),
                labels,
                frozenset(self.apart.keys() & self.pools_on[number]),
            )
            if state not in seen:
                seen.add(state)
                yield number

    def _fits(self, index: int, number: int) -> bool:
        # Called a million times for a thousand units: labels and `apart_from` are only checked where there are any.
        left = self.left[number]
        for name, amount in self.needs[index].items():
            if left.get(name, 0) + ROUNDING < amount:
                return False
        return not (self.apart or any(one.labels for one in self.order[index])) or not self._refusal(index, number)

    def _refusal(self, index: int, number: int) -> str:
        """Return why a node cannot hold a unit now; empty if it can."""
        unit, left, pools = self.order[index], self.left[number], list(self.pools_on[number])
        for one in unit:
            if not labels_match(one.labels, self.nodes[number]):
                have = {key: self.nodes[number].labels.get(key, "none") for key in one.labels}
                return f"label {_pairs(have)}, wanted {_pairs(one.labels)}"
            if apart := self.apart.get(one.pool, set()).intersection(pools):
                return f"holds {', '.join(sorted(apart))}, which must be on another node"
            pools.append(one.pool)
        short = {name: amount for name, amount in self.needs[index].items() if left.get(name, 0) + ROUNDING < amount}
        missing = [f"{format_amount(name, amount - left.get(name, 0))} missing" for name, amount in short.items()]
        return (
            f"{', '.join(format_amount(name, left.get(name, 0)) for name in short)} left, {', '.join(missing)}"
            if short
            else ""
        )

    def _put(self, index: int, node: int) -> None:
        self.choices += 1
        for name, amount in self.needs[index].items():
            self.left[node][name] -= amount
        self.pools_on[node] += [one.pool for one in self.order[index]]

    def _remove(self, index: int, node: int) -> None:
        for name, amount in self.needs[index].items():
            self.left[node][name] += amount
        del self.pools_on[node][-len(self.order[index]) :]

    def shortage(self) -> str:
        """Return what is missing on which node, for the reservation `stuck_at`."""
        assert self.stuck_at is not None
        [one] = self.order[self.stuck_at]
        wanted = ", ".join(format_amount(name, amount) for name, amount in one.resources.items())
        count = len(one.bundles)
        what = f"{count} worker processes" if count > 1 else "1 worker process"
        reasons = [f"{node.name}: {self._refusal(self.stuck_at, number)}" for number, node in enumerate(self.nodes)]
        more = [f"and {len(reasons) - MAX_NODES_SHOWN} more"] if len(reasons) > MAX_NODES_SHOWN else []
        together = " together" if count > 1 else ""
        return (
            f"no node can hold {what} of {one.pool!r} ({wanted}{together}) beside the rest of the job; "
            f"{'; '.join([*reasons[:MAX_NODES_SHOWN], *more]) or 'there are no nodes'}. {one.hint}"
        )


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def format_amount(name: str, amount: float) -> str:
    """Return an amount of a resource with its unit, as in `2 GPU`."""
    size, unit = UNITS.get(name, (1, name))
    return f"{amount / size:g} {unit}"


def slots_on_node(bundle: Mapping[str, float], node: NodeCapacity, *, limit: int) -> int:
    """Return how many slots of these resources an otherwise empty node holds, at most `limit`."""
    fitting = [(node.resources.get(name, 0) + ROUNDING) // amount for name, amount in bundle.items() if amount]
    return int(min([limit, *fitting]))


def largest_fitting(
    full: Sequence[int],
    capacities: Sequence[int],
    *,
    max_slots: int,
    fits: Callable[[Sequence[int]], bool],
    unit: int = 1,
) -> list[int]:
    """Return the slots per node of the largest pool that fits, larger nodes first; empty if none does.

    Slots are left out on the node that holds the fewest, so that few nodes are used. Where whole units are on one node
    in the whole pool, they are in the smaller one.

    Args:
        full: slots on each node of the whole pool.
        capacities: slots that each node of the cluster could hold, alone.
        max_slots: upper bound of their sum.
        fits: returns whether the cluster holds the whole job with such a pool.
        unit: divides the sum; so many slots share a model.
    """
    wanted = sorted(full, reverse=True)
    if sum(wanted) <= max_slots and fits(full):
        return list(full)
    step = 1 if any(size % unit for size in full) else unit
    held = [min(pair) // step * step for pair in zip(wanted, sorted(capacities, reverse=True), strict=False)]
    sizes = [size for size in held if size]
    while sizes and (sum(sizes) > max_slots or sum(sizes) % unit or not fits(sizes)):
        sizes[-1] -= step
        sizes = sorted((size for size in sizes if size), reverse=True)
    return sizes
