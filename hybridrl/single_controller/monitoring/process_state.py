"""`PROCESS`: what a process has once, however many trainers run in it.

Used by `tracing.py`, `heartbeat_client.py`, `lost_workers.py`, `references.py` and `awaiting.py`, and by the workers'
`process_setup.py`, in the driver and in worker processes. What belongs to one run is in `driver/run_context.py`.
"""

import asyncio
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridrl.single_controller.monitoring.part_times import PartTimes


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
    event_loop: asyncio.AbstractEventLoop | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

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
        self.trace = self.master = self.event_loop = None
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
