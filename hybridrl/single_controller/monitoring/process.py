"""`PROCESS`: what a process has once, however many trainers run in it, and what it exchanges with its job's master.

Used in the driver and in worker processes. What belongs to one run is in `driver/run_context.py`.

The master detects lost workers before Ray does, much earlier when a machine disappears, and knows how they ended. It
reports them to this process, and `wait_all` looks here: pending calls to such a worker fail at once, with the master's
reason. The process reports calls without an answer, decisions and new numbers of ranks to the master, if there is one.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from hybridrl.failure_policy import Decision

logger = logging.getLogger(__name__)
REPORT_TIMEOUT_S = 3.0  # Ray may notice a death some milliseconds before the master has read the exit status
RANKS_TIMEOUT_S = 20.0  # for a master that is being restarted


class PartTimes(dict[str, float]):
    """Where the seconds of an operation went: name of a part -> seconds so far, in the order of their first end."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a part, also if the block raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.monotonic() - start

    def split(self, name: str, inner: Mapping[str, float]) -> None:
        """Count the seconds of inner parts separately; the part that contains them keeps the rest."""
        rest = self.pop(name, 0.0)
        for inner_name, seconds in inner.items():
            counted = min(seconds, rest)
            self[inner_name] = self.get(inner_name, 0.0) + counted
            rest -= counted
        self[name] = rest

    def drain(self) -> dict[str, float]:
        """Return all parts and start again at zero."""
        found = dict(self)
        self.clear()
        return found


class WorkDone(NamedTuple):
    """What a call has done so far.

    Attributes:
        done: So many `unit`.
        total: Of at most so many.
        unit: "tokens" of a rollout, "rows" of an engine.
    """

    done: int
    total: int
    unit: str

    def __str__(self) -> str:
        return f"{self.done:,} of {self.total:,} {self.unit}"


class SpanWriter(Protocol):
    """Writes the spans of this process, see `TraceFile`."""

    def write(self, kind: str, name: str, begin: int, end: int, **attributes: Any) -> None:
        """Write a span."""

    def close(self) -> None:
        """End the recording."""


class MasterConnection(Protocol):
    """Sends to the master of this process's job, see `HeartbeatClient`."""

    def send(self, data: Mapping[str, Any]) -> None:
        """Queue a message; returns at once."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until the master has acknowledged every message; return whether it has."""
        ...

    def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Return what a method of the master returns after all messages; None without an answer in time."""

    def stop(self) -> None:
        """Close the connection."""


@dataclass(eq=False)
class ProcessState:
    """Everything that is process-wide.

    Attributes:
        trace: The recording in progress. A process writes one at a time: the one that started last.
        master: The connection to the job's master. With several jobs, of the one that connected last.
        addresses: Actors whose calls this process may wait for: actor id (hex) -> (roles joined by "+", rank).
        answering: Those of them that answer questions while they work: actor id (hex) -> Ray's name.
        lost_reasons: How actors were lost, by actor id (hex), as the master reported it.
        expects_reports: Whether the master reports every lost worker of this process's job to it.
        start_times: Seconds of those parts of a worker's start that only its process can measure.
        worker: Role (several joined by "+") and rank of this process; None in a driver.
        work: What the call in progress has done so far, if it counts.
        event_loop: Where coroutines run, on a thread of its own; started by the first coroutine.
        lock: Held to change the tables and to start the loop.
    """

    trace: SpanWriter | None = None
    master: MasterConnection | None = None
    addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    answering: dict[str, str] = field(default_factory=dict)
    lost_reasons: dict[str, str] = field(default_factory=dict)
    expects_reports: bool = False
    start_times: PartTimes = field(default_factory=PartTimes)
    worker: tuple[str, int] | None = None
    work: WorkDone | None = None
    event_loop: asyncio.AbstractEventLoop | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def register_actors(
        self, addresses: Mapping[str, tuple[str, int]], answering: Mapping[str, str] | None = None
    ) -> None:
        """Add to the tables of these names, so that `WorkerLost` names the worker that died."""
        with self.lock:
            self.addresses.update(addresses)
            self.answering.update(answering or {})

    def forget_actors(self, actor_ids: Iterable[str]) -> None:
        """Remove actors that have ended from the tables; unknown ids (hex) have no effect."""
        with self.lock:
            for actor_id in actor_ids:
                self.addresses.pop(actor_id, None)
                self.answering.pop(actor_id, None)
                self.lost_reasons.pop(actor_id, None)

    def reset(self) -> None:
        """Return to the state of a new process.

        Ends recording, connection and event loop, and empties the tables.
        """
        trace, master, loop = self.trace, self.master, self.event_loop
        self.trace = self.master = self.event_loop = self.work = None
        self.addresses.clear()
        self.answering.clear()
        self.lost_reasons.clear()
        self.start_times.clear()
        self.expects_reports = False
        if trace is not None:
            trace.close()
        if master is not None:
            master.stop()
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


PROCESS = ProcessState()


def mark_lost(actor: str, reason: str) -> None:
    """Record that the master reported the worker with this actor id (hex) as lost; its replacement has another id."""
    PROCESS.lost_reasons[actor] = reason


def lost_reason(reference: Any) -> str | None:
    """Return how the worker that computes this Ray reference was lost, or None if the master has not reported it."""
    reasons = PROCESS.lost_reasons
    return reasons.get(reference.task_id().actor_id().hex()) if reasons else None


def await_report(actor: str) -> str | None:
    """Return how the worker with this actor id (hex) was lost.

    Waits a moment for the report if this process gets reports.
    """
    until = time.monotonic() + (REPORT_TIMEOUT_S if PROCESS.expects_reports else 0.0)
    while (reason := PROCESS.lost_reasons.get(actor)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return reason


def ask_master(method: str, *args: Any, timeout_s: float) -> Any:
    """Return the answer of this process's master to a question, which it gets after all reports.

    None without a master, or without an answer within `timeout_s`.
    """
    return None if PROCESS.master is None else PROCESS.master.ask(method, *args, timeout_s=timeout_s)


def report_call_timeout(call: str, silent: Mapping[str, Sequence[int]], evidence: str) -> None:
    """Report to the master that workers did not answer a call in time.

    Args:
        call: `role.method`.
        silent: Role -> ranks that did not answer.
        evidence: The same as a sentence.
    """
    if (master := PROCESS.master) is not None:
        master.send({"call_timeout": {"call": call, "silent": dict(silent), "evidence": evidence}})


def report_event(name: str, **fields: Any) -> bool:
    """Report an event (`master/state/events.py`), which the master writes into the job's journal; returns at once.

    Returns:
        Whether this process has a master.
    """
    if (master := PROCESS.master) is not None:
        master.send({"event": name, **fields})
    return master is not None


def report_decision(decision: "Decision") -> None:
    """Report to the master what follows a failure."""
    report_event("RecoveryDecided", **decision.to_json())


def report_ranks(sizes: Mapping[str, int], text: str) -> None:
    """Report to the master that all workers end now and so many start instead.

    Returns when the master has received it, so that it does not take their end for a failure.

    Args:
        sizes: Roles of a process, joined by "+" -> number of processes.
        text: Why, as a sentence.
    """
    report_event("RanksChanged", sizes=dict(sizes), text=text)
    if (master := PROCESS.master) is not None and not master.drain(RANKS_TIMEOUT_S):
        logger.warning("the master did not answer within %g s; it may report ended workers as lost", RANKS_TIMEOUT_S)
