"""Calls on the processes of a role that return at once: `start_call` sends one and returns its future.

Any process of a job may call any role. Who is called is looked up once per role (`known_role`) and again after a loss.
A call whose process was lost is sent again in two cases only: the process had been replaced before the call began, so
that nothing ran; or its endpoint is idempotent. Otherwise the future gets the loss, in the master's words.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import WorkerLost
from hybridrl.master.jobs.roster import Roster, lookup_roster, loss_account
from hybridrl.sdk.pending_calls import PENDING, PendingCall
from hybridrl.single_controller.awaiting import TIMEOUT_HINT, call_timeout
from hybridrl.single_controller.call_cycles import CHECK_PERIOD_S, waiting_for
from hybridrl.single_controller.invocation import Invocation
from hybridrl.single_controller.references import OutputRefs
from hybridrl.single_controller.worker_group import Arguments, WorkerGroup

# A call that loses its process every time probably ends the process itself.
MAX_SENDS = 3
REPLACED_POLL_S = 0.25  # a loss is known to the caller before the job supervisor starts a new process
REPLACED_TIMEOUT_S = 60.0


class KnownRole:
    """The processes of a role at one epoch, as a worker group of this process.

    Attributes:
        ready_at: By rank, when the process was ready at the latest, of this process's monotonic clock.
    """

    def __init__(self, roster: Roster) -> None:
        self.epoch, self.endpoints, self.names = roster.epoch, roster.endpoints, list(roster.handle.names)
        self.ready_at = [time.monotonic() - seconds for seconds in roster.ready_for_s]
        self.group: WorkerGroup = roster.handle.to_group()


_KNOWN: dict[str, KnownRole] = {}  # role -> processes that were looked up last
_KNOWN_LOCK = threading.Lock()


def known_role(role: str, *, after: KnownRole | None = None) -> KnownRole:
    """Return the processes of a role; from memory, unless they are those of `after`.

    Args:
        role: In lower case.
        after: Processes of which one was lost. The same ones are returned if none has been replaced yet.
    """
    with _KNOWN_LOCK:
        known = _KNOWN.get(role)
    if known is not None and known is not after:
        return known
    roster = lookup_roster(role)
    if known is not None and roster.epoch == known.epoch:
        return known
    with _KNOWN_LOCK:
        _KNOWN[role] = KnownRole(roster)
        return _KNOWN[role]


def forget_processes() -> None:
    """Look every role up again at its next call."""
    with _KNOWN_LOCK:
        _KNOWN.clear()


@dataclass
class RoleCall:
    """One call on some processes of a role, until it has their outputs.

    Attributes:
        method: Name of the endpoint.
        ranks: Whom it calls.
        arguments: By rank.
        began: Of the monotonic clock.
        deadline: As `time.monotonic()` counts; None for no limit.
        references: Rank -> reference to its output.
        answers: The futures of the outputs, in the order of `ranks`.
        num_sends: How often it was sent.
    """

    role: str
    method: str
    processes: KnownRole
    invocation: Invocation
    ranks: Sequence[int]
    arguments: Sequence[Arguments]
    began: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    references: dict[int, Any] = field(default_factory=dict)
    answers: Sequence["Future[Any]"] = ()
    num_sends: int = 1

    def send(self, ranks: Sequence[int]) -> None:
        arguments = [self.arguments[rank] for rank in ranks]
        sent = self.processes.group.start_calls(self.method, ranks, arguments, invocation=self.invocation)
        self.references.update(zip(ranks, sent, strict=True))

    def watch(self, resolve: Callable[[], None]) -> None:
        """Have `resolve` called when `outputs` no longer has to wait."""
        group, references = self.processes.group, [self.references[rank] for rank in self.ranks]
        self.answers = group.as_futures(references)
        PENDING.add(PendingCall(self.answers, self.deadline, lambda: any(map(group.is_lost, references)), resolve))

    def pending(self) -> list[Any]:
        """Return references to the outputs that are not there."""
        answers = zip(self.ranks, self.answers, strict=True)
        return [self.references[rank] for rank, answer in answers if not answer.done()]

    def outputs(self) -> list[Any]:
        """Return the outputs, by rank, of a call that `watch` has found to be decided.

        Raises the first failure.
        """
        group, answers = self.processes.group, dict(zip(self.ranks, self.answers, strict=True))
        silent = [rank for rank, answer in answers.items() if not answer.done()]
        failed = any(answer.done() and answer.exception() is not None for answer in self.answers)
        if not silent and not failed:
            return [answer.result() for answer in self.answers]
        if not failed and not any(group.is_lost(self.references[rank]) for rank in silent):
            addresses = [(self.role, rank) for rank in silent]
            raise call_timeout(self.role, addresses, self.method, self.invocation.timeout_s or 0.0, TIMEOUT_HINT)
        references = OutputRefs([self.references[r] for r in self.ranks], ranks=self.ranks, fetch=group.fetch)
        return group.fetch(references, method=self.method, timeout_s=self._seconds_left())

    def _seconds_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def send_again(self, lost: WorkerLost) -> None:
        """Send the call to the processes that replaced lost ones; raise the loss if that might run it twice."""
        if lost.role != self.role or lost.rank not in self.ranks:
            raise lost  # of another process: the called one waited for it, or got its output as an argument
        before = self.processes
        try:
            now = self._replacement(lost, before)
        except Exception as error:  # the role did not come back, or the job has ended
            raise loss_account(lost) from error
        replaced = [rank for rank in self.ranks if now.names[rank] != before.names[rank]]
        again = [r for r in replaced if self.invocation.idempotent or now.ready_at[r] < self.began]
        if lost.rank not in again or self.num_sends >= MAX_SENDS:
            raise loss_account(lost)
        self.num_sends += 1
        self.processes = now
        self.send(again)

    def _replacement(self, lost: WorkerLost, before: KnownRole) -> KnownRole:
        """Return the current processes; an idempotent call waits until the lost one is replaced."""
        left, now = self._seconds_left(), before
        until = time.monotonic() + (REPLACED_TIMEOUT_S if left is None else min(REPLACED_TIMEOUT_S, left))
        while True:
            now = known_role(self.role, after=now)
            is_replaced = now.names[lost.rank] != before.names[lost.rank]
            if is_replaced or not self.invocation.idempotent or time.monotonic() > until:
                return now
            time.sleep(REPLACED_POLL_S)


class CallFuture(Future):
    """The future of a call.

    A worker that waits for it, and keeps the called process waiting, gets CallCycle.
    """

    def __init__(self, call: RoleCall) -> None:
        super().__init__()
        self._call = call
        self.set_running_or_notify_cancel()  # what is sent cannot be cancelled

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._wait(timeout))

    def _wait(self, timeout: float | None) -> float | None:
        """Wait for the end of the call as part of the call that this process executes; return the seconds left."""
        if self.done():
            return timeout
        until = None if timeout is None else time.monotonic() + timeout
        with waiting_for(self._call.pending(), role=self._call.role, method=self._call.method) as waiting:
            while not self.done() and (until is None or time.monotonic() < until):
                wait_s = CHECK_PERIOD_S if until is None else min(CHECK_PERIOD_S, until - time.monotonic())
                if not PENDING.work(wait_s):
                    wait([self], timeout=wait_s)
                if not self.done():
                    waiting.raise_if_cycle(self._call.pending())
        return None if until is None else max(0.0, until - time.monotonic())


def start_call(call: RoleCall, collect: Callable[[list[Any]], Any]) -> "Future[Any]":
    """Send a call and return the future of `collect(outputs)`.

    The future always ends: with a value, with what a process raised, with the loss of a process, or with CallTimeout.
    """
    timeout_s = call.invocation.timeout_s
    call.deadline = None if timeout_s is None else time.monotonic() + timeout_s
    call.send(call.ranks)
    future = CallFuture(call)

    def resolve() -> None:
        try:
            try:
                value = collect(call.outputs())
            except WorkerLost as lost:
                call.send_again(lost)
                return call.watch(resolve)
        except BaseException as error:
            return future.set_exception(error)
        future.set_result(value)

    call.watch(resolve)
    return future


def refuse_event_loop(role: str, method: str) -> None:
    """Raise RuntimeError on a thread that runs an event loop: the loop would stand still during the call."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"{role}.{method}() was called on this process's event loop, which it would stop; from a coroutine write "
        f"`future = await asyncio.to_thread(group.call, {method!r}, ...)`, then `await asyncio.wrap_future(future)`"
    )
