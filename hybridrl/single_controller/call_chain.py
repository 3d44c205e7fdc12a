"""Which calls led to the call that this process executes, and which calls it waits for.

A worker that executes a call may call other workers. Every call therefore carries a `CallHeader` with its chain: the
calls that led to it, the driver's first. `WorkerHost` enters a `CallInProgress`; `awaiting.wait_all` records its waits.

A process has one thread for most calls. When actor-0.update waits for rollout-0.push, and that waits for
actor-0.weights, none of them ends. A wait that is older than `CHECK_PERIOD_S` and whose target is in its own chain asks
the processes of the chain, through their `CONTROL` threads, whether each call really waits for the next. If all do, it
raises `CallCycle`. Processes without `CONTROL` cannot be asked; there the call's deadline ends the wait.

Threads that user code starts have no chain, so their waits are neither recorded nor checked.
"""

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from hybridrl.errors import CallCycle
from hybridrl.single_controller.cluster import find_actor
from hybridrl.single_controller.invocation import CONTROL

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
        waits: Ray's ids (hex) of the calls that it waits for, one set per wait.
    """

    chain: tuple[CallLink, ...]
    threads: str | None = None
    waits: list[frozenset[str]] = field(default_factory=list)

    @property
    def link(self) -> CallLink:
        return self.chain[-1]

    def waits_for(self, call: str) -> bool:
        """Return whether the call waits for this one at the moment."""
        return any(call in waited for waited in list(self.waits))


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
    """A wait of the current call. `raise_if_cycle` may be called often; it returns at once most of the time."""

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
    waited = frozenset(reference.task_id().hex() for reference in references)
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
        return all(ray.get(questions, timeout=ANSWER_TIMEOUT_S))
    except (ray.exceptions.RayError, TimeoutError):  # a process is lost or busy: whoever waits for it finds out
        return False
