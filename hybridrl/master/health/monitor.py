"""`Monitor`: turns heartbeats, ended connections and silence into events. Makes no decisions.

The master's thread is its only writer. A connection that ends means a death as soon as the kernel confirms that the
process is gone. For a silent process the monitor reads its kernel state: a stopped process is reported as frozen. A
silent process that still uses CPU is only reported as silent, because a long call may hold the GIL.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hybridrl.master.health.hang_diagnosis import Activity
from hybridrl.master.health.heartbeat_server import Connection
from hybridrl.master.health.kernel_process import PidfdWatch
from hybridrl.master.health.low_resources import LowResourceDetector, low_memory_note
from hybridrl.master.health.process_record import ProcessRecord
from hybridrl.master.health.stragglers import StragglerDetector
from hybridrl.master.state import events as job_events
from hybridrl.master.state.reducer import JobState
from hybridrl.master.state.tables import WorkerPhase
from hybridrl.system.process_stat import FREEZE_TIMEOUT_S, STOPPED, ProcessStat, read_process_stat

EXIT_STATUS_TIMEOUT_S = 0.3  # the exit status becomes readable when the parent has reaped the process
SELF_STALL_S = 2.0  # a longer gap between two checks means that the master itself was stopped
RECONNECT_TIMEOUT_S = 15.0  # for a process of another machine whose connection ended and whose state is unknown
PROBE_PERIOD_S = 1.0  # between two reads of a silent process's kernel state
CAPACITY_PERIOD_S, STRAGGLER_PERIOD_S = 1.0, 5.0


# Reads the kernel state of a process of another machine and passes it to the callback; None if it cannot be read.
RemoteProbe = Callable[[ProcessRecord, Callable[[ProcessStat | None], None]], None]


class Monitor:
    """Tracks all processes of a job.

    Args:
        machine_id: The master's own machine.
        probe_remote: Reads the kernel state of a process of another machine.
        node_loss_reason: Returns why a node is lost, as text; "" if it is alive.
        silence_timeout_s: Seconds without a message after which a process is silent.
        run_directory: The directory whose disk is monitored.
    """

    def __init__(
        self,
        machine_id: str,
        probe_remote: RemoteProbe,
        node_loss_reason: Callable[[str], str],
        *,
        silence_timeout_s: float = FREEZE_TIMEOUT_S,
        run_directory: str = "",
    ) -> None:
        self.processes: dict[str, ProcessRecord] = {}
        self.longest_call_s: dict[str, float] = {}  # per method, as far as heartbeats showed it
        self._machine_id, self._probe_remote, self._silence_timeout_s = machine_id, probe_remote, silence_timeout_s
        self._node_loss_reason = node_loss_reason
        self._last_check = time.monotonic()
        self._events: list[job_events.JobEvent] = []
        self._low_resources, self._stragglers = LowResourceDetector(run_directory), StragglerDetector()
        self._next_check = {self._low_resources: 0.0, self._stragglers: 0.0}

    def expect_workers(self, state: JobState) -> None:
        """Add the processes that a previous master knew.

        They count as disconnected until they reconnect.
        """
        for slot, worker in state.workers.items():
            if worker.state in (WorkerPhase.ALIVE, WorkerPhase.SILENT):
                process = ProcessRecord(slot, worker.name, worker.pid, worker.node, worker.machine, time.monotonic())
                self._open_pidfd(process)
                process.idle_since = process.disconnected_at = process.last_message_at
                self.processes[slot] = process

    def _open_pidfd(self, process: ProcessRecord) -> None:
        if process.machine == self._machine_id:
            process.pidfd_watch = PidfdWatch(process.pid)

    # -- messages

    def handle_message(self, connection: Connection, message: Mapping[str, Any] | None) -> list[job_events.JobEvent]:
        """Process a message, or the end of a connection (None), and return the resulting events."""
        slot = connection.hello["slot"]
        process = self.processes.get(slot)
        if message is not None and "hello" in message:
            return [self._register(connection)]
        if process is None or process.connection is not connection:
            return []
        if message is None:
            process.connection, process.disconnected_at = None, time.monotonic()
            return []
        process.last_message_at = time.monotonic()
        if "beat" in message:
            self._update(process, message["beat"])
        if "bye" in message:
            self.remove(slot)
            return [job_events.WorkerLeft(slot, process.pid)]
        if process.is_silent:
            process.is_silent = False
            return [job_events.WorkerRecovered(slot, process.pid)]
        return []

    def _register(self, connection: Connection) -> job_events.JobEvent:
        hello = connection.hello
        self.remove(hello["slot"])
        process = ProcessRecord(
            hello["slot"], hello["name"], hello["pid"], hello["node"], hello["machine"], time.monotonic(), connection
        )
        process.idle_since, process.host = process.last_message_at, hello.get("host", process.node)
        self._open_pidfd(process)
        self.processes[process.slot] = process
        size, rank = hello.get("group_size", 1), hello.get("rank", 0)
        printed = (hello.get("stdout", ""), hello.get("stderr", ""))
        return job_events.WorkerJoined(
            process.slot, process.name, process.pid, process.node, process.machine, size, rank, *printed
        )

    def _update(self, process: ProcessRecord, beat: dict[str, Any]) -> None:
        before, method = process.beat, beat.get("doing")
        if method is not None:
            self.longest_call_s.setdefault(method, 0.0)
        if before.get("doing") is not None and (method, beat.get("calls")) != (before["doing"], before.get("calls")):
            longest_s = self.longest_call_s[before["doing"]]
            self.longest_call_s[before["doing"]] = max(longest_s, before.get("elapsed_s", 0.0))
        if method is not None or beat.get("calls") != before.get("calls"):
            process.idle_since = process.last_message_at
        process.update(beat)

    def remove(self, slot: str) -> None:
        """Stop monitoring the process of this slot."""
        process = self.processes.pop(slot, None)
        if process is not None and process.pidfd_watch is not None:
            process.pidfd_watch.close()

    # -- checks

    @property
    def awaits_exit_status(self) -> bool:
        """Whether an exit status is expected soon, so that the next check should not wait."""
        since = time.monotonic() - 2 * EXIT_STATUS_TIMEOUT_S
        return any(
            process.disconnected_at > since and process.pidfd_watch is not None for process in self.processes.values()
        )

    def check(self) -> list[job_events.JobEvent]:
        """Check all disconnected and silent processes and return the new events."""
        now = time.monotonic()
        if now - self._last_check > SELF_STALL_S:
            for process in self.processes.values():
                process.last_message_at += now - self._last_check
        self._last_check = now
        for process in list(self.processes.values()):
            if self.processes.get(process.slot) is not process:  # removed in this loop, with its node
                continue
            is_silent = now - process.last_message_at > self._silence_timeout_s
            is_due = is_silent and now - process.probed_at > PROBE_PERIOD_S
            if process.pidfd_watch is not None and (process.disconnected_at or is_due):
                self._check_local(process, is_due=is_due)
            elif is_due or (process.disconnected_at and not process.probed_at):
                process.probed_at = now
                if not self._is_lost_with_its_node(process):
                    self._probe_remote(process, partial(self._classify, process))
        events, self._events = self._events, []
        return [*events, *self._run_detectors(now)]

    def _run_detectors(self, now: float) -> list[job_events.JobEvent]:
        warnings: list[job_events.JobEvent] = []
        for detector, period_s in ((self._low_resources, CAPACITY_PERIOD_S), (self._stragglers, STRAGGLER_PERIOD_S)):
            if now >= self._next_check[detector]:
                self._next_check[detector] = now + period_s
                warnings += detector.check(self.processes.values())
        return warnings

    def mark_node_lost(self, node: str, evidence: str) -> None:
        """Mark every process of a node as lost."""
        for process in list(self.processes.values()):
            if process.node == node:
                self._mark_lost(process, job_events.Kind.NODE, evidence)

    def _is_lost_with_its_node(self, process: ProcessRecord) -> bool:
        """Return whether the node of a process is lost.

        If so, mark all processes of that node as lost.
        """
        evidence = self._node_loss_reason(process.node)
        if evidence:
            self.mark_node_lost(process.node, evidence)
        return bool(evidence)

    def _check_local(self, process: ProcessRecord, *, is_due: bool) -> None:
        assert process.pidfd_watch is not None
        if process.pidfd_watch.is_dead:
            if self._is_lost_with_its_node(process):
                return
            exit_reason = process.pidfd_watch.exit_reason()
            waited_s = time.monotonic() - (process.disconnected_at or process.last_message_at)
            if exit_reason is not None or waited_s > EXIT_STATUS_TIMEOUT_S:
                self._mark_lost(process, job_events.Kind.DIED, exit_reason or "its process is gone")
        elif is_due:
            process.probed_at = time.monotonic()
            self._classify(process, read_process_stat(process.pid))

    def _classify(self, process: ProcessRecord, stat: ProcessStat | None) -> None:
        """Append the event that a silent or disconnected process's kernel state means. stat: None if unknown."""
        if self.processes.get(process.slot) is not process:
            return
        now = time.monotonic()
        silence_s = now - process.last_message_at
        if stat is None and process.disconnected_at and now - process.disconnected_at > RECONNECT_TIMEOUT_S:
            evidence = f"its connection ended, and it did not reconnect within {RECONNECT_TIMEOUT_S:g} s"
            self._mark_lost(process, job_events.Kind.DIED, evidence)
        elif stat is not None and stat.state == "":
            self._mark_lost(process, job_events.Kind.DIED, "its process is gone")
        elif silence_s < self._silence_timeout_s:
            return
        elif stat is not None and stat.state == STOPPED and not self._is_suspended(process):
            text = f"frozen: its process is stopped (SIGSTOP), and silent for {silence_s:.1f} s{_last_report(process)}"
            self._events.append(job_events.WorkerFailed(job_events.Kind.FROZEN, process.slot, process.pid, text))
        elif not process.is_silent:
            process.is_silent = True
            text = f"silent for {silence_s:.1f} s, {_stat_text(stat, process)}"
            self._events.append(job_events.WorkerSilent(process.slot, process.pid, text))

    def _is_suspended(self, process: ProcessRecord) -> bool:
        """Return whether a stopped process is no failure: Ctrl-Z in a terminal stops the driver with its workers.

        The supervisor of a submitted job has no terminal.
        """
        driver = self.processes.get(job_events.TRAINER)
        if process is driver:
            return True
        return driver is not None and driver.pidfd_watch is not None and read_process_stat(driver.pid).state == STOPPED

    def _mark_lost(self, process: ProcessRecord, kind: job_events.Kind, evidence: str) -> None:
        self.remove(process.slot)
        self._events.append(job_events.WorkerFailed(kind, process.slot, process.pid, evidence + _last_report(process)))

    # -- activities

    def working(self) -> list[ProcessRecord]:
        """Return the processes whose last heartbeat has what their call has done. Thread-safe."""
        return [process for process in list(self.processes.values()) if process.beat.get("work")]

    def activities(self) -> list[Activity]:
        """Return what every process that has sent one does, extrapolated from its last heartbeat.

        Thread-safe.
        """
        now = time.monotonic()
        found = []
        for process in list(self.processes.values()):  # a copy: other threads call this, too
            if not process.beat:  # it has not reported to this master yet
                continue
            beat, method = process.beat, process.beat.get("doing")
            busy_s = beat.get("elapsed_s", 0.0) + now - process.last_message_at
            elapsed_s = busy_s if method else now - process.idle_since
            found.append(Activity(process.slot, method, elapsed_s, beat.get("last_method"), beat.get("call_number", 0)))
        return found


def _last_report(process: ProcessRecord) -> str:
    """Return the suffix of an exit reason: activity and memory of a process by its last heartbeat."""
    method, memory = process.beat.get("doing"), process.beat.get("memory")
    activity = f"; in {method} for {process.beat.get('elapsed_s', 0.0):.1f} s at its last heartbeat" if method else ""
    resident = f"; resident memory {memory / 2**30:.2f} GiB" if memory else ""
    return activity + resident + low_memory_note(process)


def _stat_text(stat: ProcessStat | None, process: ProcessRecord) -> str:
    if stat is None:
        return "and the state of its process is unknown"
    used_s = stat.cpu_s - process.beat.get("cpu_s", stat.cpu_s)
    if used_s > 0.5:
        return f"but its process has used {used_s:.1f} s of CPU since: a long call may hold the GIL"
    return f"its process is in state {stat.state} and has used no CPU since"
