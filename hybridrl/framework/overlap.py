"""Which stages of a step may run at the same time, and running them so. Decided from what stages say about themselves,
nothing else.

    task.run(max_step=100, overlap={"actor": {0, 1}, "critic": {2, 3}, "ref": {0, 1}})     # role -> the device slots it
    works on

Of two stages the later one waits for the earlier one
* if one of them is a barrier: it names no column, so that nothing is known of what it touches, or it changes what the
driver holds;
* if one of them writes a column that the other one reads or writes;
* if their roles share a slot: on one device they would only be in each other's way.

What two stages do then is what they would have done one after the other. Stages that may run beside others work on
forks of the context, which are joined when they end (`Context.fork`). Second halves run as ever, in reverse order.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from hybridrl.errors import ConfigError
from hybridrl.framework.stage import StageSpec

Places = Mapping[str, Collection]  # role -> slots; stages without a role are the driver's, which has none


def is_barrier(spec: StageSpec) -> bool:
    """Return whether a stage runs alone."""
    return not (spec.reads or spec.writes) or (spec.role is None and not spec.pure)


def conflict(first: StageSpec, second: StageSpec, places: Places) -> str | None:
    """Return why two stages may not run at the same time, as a phrase; None if they may."""
    for spec in (first, second):
        if is_barrier(spec):
            return f"{spec.name} is a barrier"
    written = (set(first.writes) & {*second.reads, *second.writes}) | (set(second.writes) & set(first.reads))
    if written:
        return f"columns {', '.join(sorted(written))}"
    shared = _slots(first, places) & _slots(second, places)
    return f"slots {', '.join(sorted(map(str, shared)))}" if shared else None


def dependencies(specs: Sequence[StageSpec], places: Places) -> list[frozenset[int]]:
    """Return, for every stage, the places in the order of those before it that it waits for.

    ConfigError for a role without a place.
    """
    for spec in specs:
        _slots(spec, places)
    return [frozenset(i for i in range(j) if conflict(specs[i], specs[j], places)) for j in range(len(specs))]


def _slots(spec: StageSpec, places: Places) -> frozenset:
    if spec.role is None:
        return frozenset()
    if spec.role not in places:
        raise ConfigError(
            f"stage {spec.name!r} is the work of {spec.role!r}, which has no place; placed are {', '.join(places)}"
        )
    return frozenset(places[spec.role])


class Step(Protocol):
    """The stages of one step, by their places in the order; all of this is called in the thread that runs the plan."""

    def run_here(self, index: int) -> Any:
        """Run a stage beside which nothing runs, and return its result."""

    def begin(self, index: int) -> Future:
        """Begin a stage in another thread."""

    def end(self, index: int, future: Future) -> Any:
        """Return the result of a stage that has ended, or raise its exception."""

    def give_up(self, futures: list[Future], error: BaseException) -> None:
        """A stage has failed: what was begun is not waited for."""


class OverlapPlan:
    """The order of one step. waits: see `dependencies`. alone: stages beside which no other can run."""

    def __init__(self, specs: Sequence[StageSpec], places: Places) -> None:
        self.waits = dependencies(specs, places)
        before = _all_before(self.waits)
        everyone = range(len(specs))
        self.alone = frozenset(i for i in everyone if all(i == j or i in before[j] or j in before[i] for j in everyone))
        # So many threads that no stage has to wait for one.
        self.num_threads = max(1, len(specs) - len(self.alone))

    def run(self, step: "Step") -> list:
        """Return the stages' results, in their order. Each is begun as soon as all it waits for has ended.

        The first exception is raised at once; `give_up` is then called with all that was begun.
        """
        results: dict[int, Any] = {}
        futures: dict[Future, int] = {}
        running: set[Future] = set()
        waiting = list(range(len(self.waits)))
        try:
            while waiting or running:
                for i in [i for i in waiting if self.waits[i] <= results.keys()]:
                    waiting.remove(i)
                    if i in self.alone:  # and therefore nothing else is running
                        results[i] = step.run_here(i)
                    else:
                        futures[future := step.begin(i)] = i
                        running.add(future)
                done, running = wait(running, return_when=FIRST_COMPLETED) if running else ((), running)
                results |= {
                    futures[future]: step.end(futures[future], future)
                    for future in sorted(done, key=futures.__getitem__)
                }
        except BaseException as error:
            step.give_up(list(futures), error)
            raise
        return [results[i] for i in range(len(self.waits))]


def _all_before(waits: Sequence[frozenset[int]]) -> list[set[int]]:
    before: list[set[int]] = []
    for own in waits:
        before.append(set(own).union(*(before[i] for i in own)))
    return before
