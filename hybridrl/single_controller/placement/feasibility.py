"""Whether machines can hold a job's reservations, and if not, what is missing where. A pure question about numbers:
nothing is reserved.

check_feasible(plan.reservations(), machines)      # raises PlacementError, before anything starts
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.plan import Reservation

# Packing is hard in the worst case. A search that has made so many choices stops, and Ray shall try: only what is
# proven is refused.
MOST_CHOICES = 5_000
# Reservations that share a machine.
Unit = tuple[Reservation, ...]
ROUNDING = 1e-6  # of amounts that add up
SHOWN_MACHINES = 4
SELECTOR = re.compile(r"(?P<no>!?)(?:in\((?P<many>[^()]*)\)|(?P<one>[^()!]*))")
UNITS = {"memory": (2**20, "MB memory")}  # of resources that are not counted in ones


@dataclass(frozen=True)
class Machine:
    """A node of a cluster: all it has, by Ray's names of resources, and its labels."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def selects(labels: Mapping[str, str], machine: Machine) -> bool:
    """Return whether a machine has these labels. A wanted value is `a`, `!a`, `in(a,b)` or `!in(a,b)`, as for Ray."""
    return all(_matches(wanted, machine.labels.get(key)) for key, wanted in labels.items())


def _matches(wanted: str, value: str | None) -> bool:
    found = SELECTOR.fullmatch(wanted)
    if found is None:
        return False
    values = [found["one"]] if found["many"] is None else [name.strip() for name in found["many"].split(",")]
    return (value in values) != bool(found["no"])


def check_feasible(reservations: Sequence[Reservation], machines: Sequence[Machine]) -> None:
    """Raise PlacementError if the machines, empty but for these reservations, cannot hold all of them, each on one
    machine.
    """
    search = _Search(sorted(((one,) for one in reservations), key=_weight, reverse=True), machines)
    search.run()
    if search.stuck_at is not None and search.choices <= MOST_CHOICES:
        raise PlacementError(search.shortage())


def assign(units: Sequence[Unit], machines: Sequence[Machine]) -> list[int] | None:
    """Return a machine for each unit, by its number, so that all of its reservations are there.

    None where none was found.
    """
    order = sorted(range(len(units)), key=lambda number: _weight(units[number]), reverse=True)
    search = _Search([units[number] for number in order], machines)
    search.run()
    if search.stuck_at is not None:
        return None
    homes = dict(zip(order, search.homes, strict=True))
    return [homes[number] for number in range(len(units))]


def _weight(unit: Unit) -> tuple:
    """Hardest first: what few machines suit, then what is large."""
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
    """Depth first over units, the first machine that suits first. Machines that are alike at that moment are tried
    once.

    homes: the machine of each unit when it has ended well. stuck_at: the furthest unit for which there was no machine,
    None if all have one; left, holds: what was left of every machine then, and whose reservations it held.
    """

    def __init__(self, order: Sequence[Unit], machines: Sequence[Machine]):
        self.order, self.machines = order, machines
        self.needs = [_sum(unit) for unit in order]
        self.apart: dict[str, set[str]] = {}
        for one in (one for unit in order for one in unit):
            for other in one.apart_from:
                self.apart.setdefault(one.pool, set()).add(other)
                self.apart.setdefault(other, set()).add(one.pool)
        self.left = [dict(machine.resources) for machine in machines]
        self.holds: list[list[str]] = [[] for _ in machines]
        self.choices = 0
        self.homes: list[int] = []
        self.stuck_at: int | None = None

    def run(self) -> None:
        """A loop, not a recursion: a job may have thousands of reservations."""
        open_choices: list[Iterator[int]] = [self._homes(0)] if self.order else []
        taken: list[int] = []
        stuck = (-1, self.left, self.holds)
        while open_choices and self.choices <= MOST_CHOICES:
            index = len(open_choices) - 1
            if len(taken) > index:
                self._take_back(index, taken.pop())
            home = next(open_choices[-1], None)
            if home is None:
                if index > stuck[0]:
                    stuck = (index, [dict(left) for left in self.left], [list(pools) for pools in self.holds])
                open_choices.pop()
                continue
            self._take(index, home)
            taken.append(home)
            if len(taken) == len(self.order):
                self.homes = taken
                return
            open_choices.append(self._homes(index + 1))
        if self.order:
            self.stuck_at, self.left, self.holds = stuck

    def _homes(self, index: int) -> Iterator[int]:
        seen = set()
        for number, machine in enumerate(self.machines):
            if not self._fits(index, number):
                continue
            labels_matter = any(
                one.labels for unit in self.order[index + 1 : index + 2] for one in unit
            )  # those with labels come first
            labels = tuple(sorted(machine.labels.items())) if labels_matter else ()
            alike = (
                tuple(sorted(self.left[number].items())),
                labels,
                frozenset(self.apart.keys() & self.holds[number]),
            )
            if alike not in seen:
                seen.add(alike)
                yield number

    def _fits(self, index: int, number: int) -> bool:
        """Whether a machine can hold a unit now; asked a million times for a thousand units."""
        left = self.left[number]
        for name, amount in self.needs[index].items():
            if left.get(name, 0) + ROUNDING < amount:
                return False
        return not (self.apart or any(one.labels for one in self.order[index])) or not self._refusal(index, number)

    def _refusal(self, index: int, number: int) -> str:
        """Why a machine cannot hold a unit now, in words; empty if it can."""
        unit, left, held = self.order[index], self.left[number], list(self.holds[number])
        for one in unit:
            if not selects(one.labels, self.machines[number]):
                have = {key: self.machines[number].labels.get(key, "none") for key in one.labels}
                return f"label {_pairs(have)}, wanted {_pairs(one.labels)}"
            if apart := self.apart.get(one.pool, set()).intersection(held):
                return f"holds {', '.join(sorted(apart))}, from which it has to be apart"
            held.append(one.pool)
        short = {name: amount for name, amount in self.needs[index].items() if left.get(name, 0) + ROUNDING < amount}
        missing = [f"{in_words(name, amount - left.get(name, 0))} missing" for name, amount in short.items()]
        return (
            f"{', '.join(in_words(name, left.get(name, 0)) for name in short)} left, {', '.join(missing)}"
            if short
            else ""
        )

    def _take(self, index: int, machine: int) -> None:
        self.choices += 1
        for name, amount in self.needs[index].items():
            self.left[machine][name] -= amount
        self.holds[machine] += [one.pool for one in self.order[index]]

    def _take_back(self, index: int, machine: int) -> None:
        for name, amount in self.needs[index].items():
            self.left[machine][name] += amount
        del self.holds[machine][-len(self.order[index]) :]

    def shortage(self) -> str:
        """What is missing where, of the reservation it got stuck at."""
        assert self.stuck_at is not None
        [one] = self.order[self.stuck_at]
        wanted = ", ".join(in_words(name, amount) for name, amount in one.resources.items())
        count = len(one.bundles)
        what = f"{count} worker processes" if count > 1 else "1 worker process"
        reasons = [
            f"{machine.name}: {self._refusal(self.stuck_at, number)}" for number, machine in enumerate(self.machines)
        ]
        more = [f"and {len(reasons) - SHOWN_MACHINES} more"] if len(reasons) > SHOWN_MACHINES else []
        together = " together" if count > 1 else ""
        return (
            f"no node can hold {what} of {one.pool!r} ({wanted}{together}) beside the rest of the job; "
            f"{'; '.join([*reasons[:SHOWN_MACHINES], *more]) or 'there are no nodes'}. {one.way_out}"
        )


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def in_words(name: str, amount: float) -> str:
    """Return an amount of a resource with its unit."""
    size, words = UNITS.get(name, (1, name))
    return f"{amount / size:g} {words}"
