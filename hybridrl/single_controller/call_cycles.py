"""Find calls between workers that wait for each other, so that none of them can return.

A worker that executes a call may call other workers and wait for them. All calls of a process share one thread, except
those with `concurrency` above 1. When actor-0.update waits for rollout-0.push, and that waits for actor-0.weights, none
of them ends.

`WorkerHost` enters a `CallInProgress`, and `awaiting.wait_all` records its waits. A wait that is older than
`CHECK_PERIOD_S` asks the awaited processes which call has to end before the awaited one can: the call itself, or the
one that has its thread. Then it asks the processes which these calls wait for, and so on. If that leads back to the
current call, twice in a row, one of the calls raises `CallCycle`.

Processes answer in their `CONTROL` threads. Those without one cannot be asked; there the call's deadline ends the wait.
Waits of threads that user code starts belong to no call and are not recorded.
"""

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridrl.errors import CallCycle
from hybridrl.single_controller.cluster import find_actor, get_value
from hybridrl.single_controller.invocation import CONTROL
from hybridrl.single_controller.monitoring.process import PROCESS

# A wait is checked after this time, and then again and again: a caller may begin to wait later.
CHECK_PERIOD_S = 1.0
# A process answers within milliseconds; one that does not is asked again at the next check.
ANSWER_TIMEOUT_S = 1.0


class Awaited(NamedTuple):
    """Calls of `role.method` that a call waits for.

    Attributes:
        calls: Ray's name of a process that answers questions -> Ray's ids (hex) of the calls there.
    """

    role: str
    method: str
    calls: Mapping[str, list[str]]


class Blocker(NamedTuple):
    """A call that has to end before an awaited one can.

    Attributes:
        call: Ray's id of it (hex).
        name: as `actor-0.update`.
        awaited: the awaited call, in the same form.
    """

    call: str
    name: str
    awaited: str


@dataclass(eq=False)
class CallInProgress:
    """A call that this process executes.

    Attributes:
        call: Ray's id of it (hex).
        role, method, rank: what is called, and of which worker.
        concurrency_group: The one that executes it; None for the thread of all other calls.
        start: of `time.perf_counter()`.
        waits: what it waits for at the moment.
    """

    call: str
    role: str
    method: str
    rank: int
    concurrency_group: str | None = None
    start: float = field(default_factory=time.perf_counter)
    waits: "list[Wait]" = field(default_factory=list)

    def as_blocker(self, *, awaited: str = "") -> tuple[Blocker, list[Awaited]]:
        """Return this call as one that keeps another waiting, and what it waits for itself.

        Args:
            awaited: the call that waits for the thread of this one; default this one is awaited.
        """
        name = f"{self.role}-{self.rank}.{self.method}"
        return Blocker(self.call, name, awaited or name), [wait.awaited() for wait in list(self.waits)]


_current: ContextVar[CallInProgress | None] = ContextVar("call_in_progress", default=None)


@contextmanager
def executing(call: CallInProgress) -> Generator[None, None, None]:
    """Make this the current call of the block; coroutines that the block starts inherit it."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


class Wait:
    """A wait of the current call for calls of `role.method`.

    Attributes:
        pending: Ray references of the calls that have not ended.
    """

    def __init__(self, call: CallInProgress | None, pending: Iterable[Any], *, role: str, method: str) -> None:
        self._call, self._role, self._method, self.pending = call, role, method, list(pending)
        self._next_check = time.monotonic() + CHECK_PERIOD_S

    def awaited(self) -> Awaited:
        """Return the pending calls of the processes that answer questions."""
        calls: dict[str, list[str]] = {}
        for task in (reference.task_id() for reference in self.pending):
            if name := PROCESS.answering.get(task.actor_id().hex()):
                calls.setdefault(name, []).append(task.hex())
        return Awaited(self._role, self._method, calls)

    def raise_if_cycle(self, pending: Iterable[Any]) -> None:
        """Note which calls have not ended; check whether they wait for the current call.

        May be called often; it returns at once most of the time. Only one call of a cycle raises.

        Raises:
            CallCycle: names the calls of the cycle.
        """
        self.pending = list(pending)
        if self._call is None or time.monotonic() < self._next_check:
            return
        # What was the same both times has waited at one time in between.
        found = _find_cycle(self._call)
        if found and found == _find_cycle(self._call) and self._call.call == min(step.call for step in found):
            *others, own = found
            raise CallCycle([own.name, *(step.name for step in others)], [step.awaited for step in found])
        self._next_check = time.monotonic() + CHECK_PERIOD_S


@contextmanager
def waiting_for(references: Iterable[Any], *, role: str, method: str) -> Generator[Wait, None, None]:
    """Record that the current call waits for these calls of `role.method` while the block runs.

    Args:
        references: Ray references of the calls.
    """
    call = _current.get()
    wait = Wait(call, references, role=role, method=method)
    if call is None:
        yield wait
        return
    call.waits.append(wait)
    try:
        yield wait
    finally:
        call.waits.remove(wait)


def _find_cycle(call: CallInProgress) -> tuple[Blocker, ...]:
    """Return the calls that keep this one waiting, each the one before it, up to the call itself; () without any."""
    seen: set[str] = set()
    paths: list[tuple[tuple[Blocker, ...], Awaited]] = [((), wait.awaited()) for wait in list(call.waits)]
    while paths:
        path, awaited = paths.pop()
        for blocker, waits in _ask_blockers(awaited):
            if blocker.call == call.call:
                return (*path, blocker)
            if blocker.call not in seen:
                seen.add(blocker.call)
                paths += [((*path, blocker), further) for further in waits]
    return ()


def _ask_blockers(awaited: Awaited) -> list[tuple[Blocker, list[Awaited]]]:
    """Ask the awaited processes which calls keep these waiting, see `WorkerHost.blockers`."""
    import ray

    actors = [(find_actor(name), calls) for name, calls in sorted(awaited.calls.items())]
    questions = [
        actor.blockers.options(concurrency_group=CONTROL).remote(awaited.role, awaited.method, calls)
        for actor, calls in actors
        if actor is not None
    ]
    try:
        answers = get_value(questions, what="which calls block", timeout_s=ANSWER_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError):  # a process is lost or busy: whoever waits for it finds out
        return []
    return [blocker for answer in answers for blocker in answer]
