"""Find out which stages of a step may run concurrently, and run them in that order.

    task.run(max_step=100, overlap={"actor": {0, 1}, "critic": {2, 3}, "ref": {0, 1}})  # role -> its device slots

`Task.run` uses this module when it is called with `overlap=`. Only the stages' specs decide. Of two stages, the later
one waits for the earlier one

* if one of them is a barrier: it names no column, so its effects are unknown, or it changes state of the driver;
* if one of them writes a column that the other one reads or writes;
* if their roles share a device slot: they would compete for the device and gain nothing.

The result equals that of running the stages in order. Stages that may run concurrently work on forks of the context,
which are joined when they end (`Context.fork`). Second halves run in reverse order, one after the other.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from hybridrl.errors import ConfigError
from hybridrl.framework.stage import StageSpec

DeviceSlots = Mapping[str, Collection]  # role -> its device slots; stages of the driver have none


def is_barrier(spec: StageSpec) -> bool:
    """Return whether no other stage may run concurrently with this one."""
    return not (spec.reads or spec.writes) or (spec.role is None and not spec.pure)


def conflict(first: StageSpec, second: StageSpec, slots: DeviceSlots) -> str | None:
    """Return why two stages may not run concurrently, as a phrase; None if they may."""
    for spec in (first, second):
        if is_barrier(spec):
            return f"{spec.name} is a barrier"
    written = (set(first.writes) & {*second.reads, *second.writes}) | (set(second.writes) & set(first.reads))
    if written:
        return f"columns {', '.join(sorted(written))}"
    shared = _slots(first, slots) & _slots(second, slots)
    return f"slots {', '.join(sorted(map(str, shared)))}" if shared else None


def dependencies(specs: Sequence[StageSpec], slots: DeviceSlots) -> list[frozenset[int]]:
    """Return, per stage, the indices of the earlier stages that it waits for.

    Raises:
        ConfigError: A role has no device slots.
    """
    for spec in specs:
        _slots(spec, slots)
    return [frozenset(i for i in range(j) if conflict(specs[i], specs[j], slots)) for j in range(len(specs))]


def _slots(spec: StageSpec, slots: DeviceSlots) -> frozenset:
    if spec.role is None:
        return frozenset()
    if spec.role not in slots:
        raise ConfigError(
            f"stage {spec.name!r} runs in role {spec.role!r}, which has no device slots; roles that have: "
            f"{', '.join(slots)}"
        )
    return frozenset(slots[spec.role])


class StepExecutor(Protocol):
    """Runs the stages of one step for an `OverlapPlan`, by their indices.

    All methods are called in the thread that runs the plan.
    """

    def run_inline(self, index: int) -> Any:
        """Run a stage in the calling thread and return its result; no other stage runs then."""

    def submit(self, index: int) -> Future:
        """Start a stage in another thread."""

    def result(self, index: int, future: Future) -> Any:
        """Return the result of a stage that has ended, or raise its exception."""

    def cancel(self, futures: list[Future], error: BaseException) -> None:
        """Abandon the stages that were started, because one of them failed."""


class OverlapPlan:
    """The execution order of one step.

    Attributes:
        waits: Per stage, the indices of the stages that it waits for (see `dependencies`).
        exclusive: Indices of the stages with which no other stage can run concurrently.
        num_threads: Number of threads with which no stage has to wait for a thread.
    """

    def __init__(self, specs: Sequence[StageSpec], slots: DeviceSlots) -> None:
        self.waits = dependencies(specs, slots)
        before = _transitive_waits(self.waits)
        indices = range(len(specs))
        self.exclusive = frozenset(
            i for i in indices if all(i == j or i in before[j] or j in before[i] for j in indices)
        )
        self.num_threads = max(1, len(specs) - len(self.exclusive))

    def run(self, executor: "StepExecutor") -> list:
        """Return the stages' results in the order of the stages.

        A stage starts as soon as all that it waits for have ended. The first exception is raised at once, after
        `executor.cancel` was called with all started stages.
        """
        results: dict[int, Any] = {}
        futures: dict[Future, int] = {}
        running: set[Future] = set()
        waiting = list(range(len(self.waits)))
        try:
            while waiting or running:
                for i in [i for i in waiting if self.waits[i] <= results.keys()]:
                    waiting.remove(i)
                    if i in self.exclusive:  # no other stage runs now
                        results[i] = executor.run_inline(i)
                    else:
                        futures[future := executor.submit(i)] = i
                        running.add(future)
                done, running = wait(running, return_when=FIRST_COMPLETED) if running else ((), running)
                results |= {
                    futures[future]: executor.result(futures[future], future)
                    for future in sorted(done, key=futures.__getitem__)
                }
        except BaseException as error:
            executor.cancel(list(futures), error)
            raise
        return [results[i] for i in range(len(self.waits))]


def _transitive_waits(waits: Sequence[frozenset[int]]) -> list[set[int]]:
    before: list[set[int]] = []
    for own in waits:
        before.append(set(own).union(*(before[i] for i in own)))
    return before
