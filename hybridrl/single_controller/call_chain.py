"""Which calls led to the call that this process executes, and which calls it waits for.

A worker that executes a call may call other workers. Every call therefore carries a `CallHeader` with its chain: the
calls that led to it, the driver's first. `WorkerHost` enters a `CallInProgress`; `awaiting.wait_all` records its waits.

A process has one thread for most calls. When actor-0.update waits for rollout-0.push, and that waits for
actor-0.weights, none of them ends. A wait that is older than `CHECK_PERIOD_S` and whose target is in its own chain asks
the processes of the chain, through their `CONTROL` threads, whether each call really waits for the next. If all do, it
raises `CallCycle`. Processes without `CONTROL` cannot be asked; there the call's deadline ends the wait.

Two chains may also wait for each other: actor-0.update waits for rollout-0.push, which cannot start, because rollout-0
executes sample of another chain, which waits for actor-0.weights. The check therefore also follows the waits: which
call has the thread that the awaited call needs, and what it waits for. If that leads back to the current call, twice
in a row, one of the calls raises `CallCycle`.

Threads that user code starts have no chain, so their waits are neither recorded nor checked.
"""

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from hybridrl.errors import CallCycle
from hybridrl.single_controller.cluster import find_actor, get_value
from hybridrl.single_controller.invocation import CONTROL
from hybridrl.single_controller.monitoring.process_state import PROCESS

# A wait is checked after this time, and then again and again: a caller may begin to wait later.
CHECK_PERIOD_S = 1.0
# A process answers within milliseconds; one that does not is asked again at the next check.
ANSWER_TIMEOUT_S = 1.0


class CallLink(NamedTuple):
    """One call in progress, as a part of a chain.

    Attributes:
        process: name of the Ray actor that executes the call.
        actor: Ray's id of the actor (hex).
        call: Ray's id of the task (hex).
        worker: role and rank, as `actor-0`.
        method: name of the method or endpoint.
        answers: the process has a `CONTROL` thread.
    """

    process: str
    actor: str
    call: str
    worker: str
    method: str
    answers: bool


class Awaited(NamedTuple):
    """Calls that a call waits for.

    Attributes:
        calls: Ray's ids of their tasks (hex).
        processes: names of the Ray actors that execute them, as far as they answer questions.
        role, method: what is called.
    """

    calls: frozenset[str]
    processes: frozenset[str]
    role: str
    method: str


class CallHeader(NamedTuple):
    """What every call carries beside its arguments.

    Attributes:
        fencing_token: of the driver that made the call.
        chain: the calls that led to this one, the first of them first. Empty for a driver's call.
        threads: concurrency group that executes the call; None for the thread of all other calls.
    """

    fencing_token: int
    chain: tuple[CallLink, ...] = ()
    threads: str | None = None

    def encode(self) -> list[Any]:
        """Return the header as lists of plain values, which Ray serializes several times faster than a class."""
        return [self.fencing_token, list(map(list, self.chain)), self.threads]

    @classmethod
    def decode(cls, encoded: Sequence[Any]) -> Self:
        """Return the header that `encode` made a list of."""
        fencing_token, chain, threads = encoded
        return cls(fencing_token, tuple(CallLink(*link) for link in chain), threads)


@dataclass(eq=False)
class CallInProgress:
    """A call that this process executes.

    Attributes:
        chain: the calls that led here, and this one as the last.
        threads: concurrency group that executes it.
        waits: what it waits for at the moment.
    """

    chain: tuple[CallLink, ...]
    threads: str | None = None
    waits: list[Awaited] = field(default_factory=list)

    @property
    def link(self) -> CallLink:
        return self.chain[-1]

    def waits_for(self, call: str) -> bool:
        """Return whether the call waits for this one at the moment."""
        return any(call in awaited.calls for awaited in list(self.waits))


_current: ContextVar[CallInProgress | None] = ContextVar("call_in_progress", default=None)


def current_chain() -> tuple[CallLink, ...]:
    """Return the chain that a call made here would carry."""
    call = _current.get()
    return () if call is None else call.chain


@contextmanager
def executing(call: CallInProgress) -> Generator[None, None, None]:
    """Make this the current call of the block; coroutines that the block starts inherit it."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


class Wait:
    """A wait of the current call.

    `raise_if_cycle` may be called often; it returns at once most of the time.
    """

    def __init__(self, call: CallInProgress | None, role: str, method: str) -> None:
        self._call, self._role, self._method = call, role, method
        self._next_check = time.monotonic() + CHECK_PERIOD_S

    def raise_if_cycle(self, pending: Iterable[Any]) -> None:
        """Check whether one of the pending calls can never start, because its process waits for the current call.

        Args:
            pending: Ray references of the calls without a result.

        Raises:
            CallCycle: names the calls of the cycle.
        """
        if self._call is None or time.monotonic() < self._next_check:
            return
        targets = {reference.task_id().actor_id().hex() for reference in pending}
        for position, link in enumerate(self._call.chain):
            if link.actor in targets and _is_cycle(self._call.chain[position:], self._role, self._method):
                calls = [f"{step.worker}.{step.method}" for step in self._call.chain[position:]]
                raise CallCycle([*calls, f"{link.worker}.{self._method}"])
        raise_if_deadlock(self._call)
        self._next_check = time.monotonic() + CHECK_PERIOD_S


@contextmanager
def waiting_for(references: Iterable[Any], *, role: str, method: str) -> Generator[Wait, None, None]:
    """Record that the current call waits for these calls of `role.method` while the block runs.

    Args:
        references: Ray references of the calls.
    """
    call = _current.get()
    if call is None:
        yield Wait(None, role, method)
        return
    tasks = [reference.task_id() for reference in references]
    names = (PROCESS.answering.get(task.actor_id().hex()) for task in tasks)
    waited = Awaited(frozenset(task.hex() for task in tasks), frozenset(filter(None, names)), role, method)
    call.waits.append(waited)
    try:
        yield Wait(call, role, method)
    finally:
        call.waits.remove(waited)


def _is_cycle(links: Sequence[CallLink], role: str, method: str) -> bool:
    """Ask the processes of these calls whether each call waits for the next one.

    The last link is the current call. It waits for `role.method` in the process of the first.
    """
    import ray

    actors = [find_actor(link.process) for link in links]
    if not all(link.answers for link in links) or None in actors:
        return False
    following: list[str | None] = [link.call for link in links[1:]]
    questions = [
        actor.is_blocked.options(concurrency_group=CONTROL).remote(
            link.call, next_call, (role, method) if link is links[0] else None
        )
        for actor, link, next_call in zip(actors, links, [*following, None], strict=True)
    ]
    try:
        return all(get_value(questions, what="which calls wait", timeout_s=ANSWER_TIMEOUT_S))
    except (ray.exceptions.RayError, TimeoutError):  # a process is lost or busy: whoever waits for it finds out
        return False


class Blocker(NamedTuple):
    """A call that has the thread that another one waits for.

    Attributes:
        chain: of the call, itself as the last.
        awaited: the method that waits for the thread.
    """

    chain: tuple[CallLink, ...]
    awaited: str

    @property
    def link(self) -> CallLink:
        return self.chain[-1]


def raise_if_deadlock(call: CallInProgress) -> None:
    """Raise CallCycle if calls of several chains wait for each other.

    Only one of the calls raises it.

    The waits are followed twice. What was the same both times has waited at one time in between.
    """
    found = _blockers_back_to(call)
    if found is None or found != _blockers_back_to(call):
        return
    *others, _ = found
    own, calls = call.link, {blocker.link.call for blocker in found}
    if any(calls <= {link.call for link in blocker.chain} for blocker in found):
        return  # one chain: its last call finds the cycle
    if own.call == min(calls):
        links = [own, *(other.link for other in others)]
        awaited = [f"{blocker.link.worker}.{blocker.awaited}" for blocker in found]
        raise CallCycle([f"{link.worker}.{link.method}" for link in links], awaited)


def _blockers_back_to(call: CallInProgress) -> tuple[Blocker, ...] | None:
    """Return who keeps the call waiting, each the one before it, up to the call itself.

    Returns None if the call is part of no such circle.
    """
    seen: set[str] = set()
    paths: list[tuple[tuple[Blocker, ...], Awaited]] = [((), awaited) for awaited in list(call.waits)]
    while paths:
        path, awaited = paths.pop()
        for chain, waits in _ask_blockers(awaited):
            blocker = Blocker(chain, awaited.method)
            if blocker.link.call == call.link.call:
                return (*path, blocker)
            if blocker.link.call not in seen:
                seen.add(blocker.link.call)
                paths += [((*path, blocker), further) for further in waits]
    return None


def _ask_blockers(awaited: Awaited) -> list[tuple[tuple[CallLink, ...], list[Awaited]]]:
    """Ask the awaited processes which calls have the thread that the awaited call needs, see `WorkerHost.blockers`."""
    import ray

    actors = [actor for name in sorted(awaited.processes) if (actor := find_actor(name)) is not None]
    questions = [
        actor.blockers.options(concurrency_group=CONTROL).remote(awaited.role, awaited.method) for actor in actors
    ]
    try:
        answers = get_value(questions, what="which calls block", timeout_s=ANSWER_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError):
        return []
    return [blocker for answer in answers for blocker in answer]
