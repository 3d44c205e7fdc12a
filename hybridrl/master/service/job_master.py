"""`JobMaster`: the detached Ray actor that monitors one job, and `MasterLoop`, the thread in it that does the work.

It is nearly idle and does not import torch. When it dies, Ray restarts it. It then replays its journal and waits for
the processes that it knew; these find it by its actor name. Training continues without it meanwhile.
"""

import logging
import os
import queue
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.master.health.hang_detector import HangDetector
from hybridrl.master.health.heartbeat_server import LOOPBACK, Connection, HeartbeatServer, needed_host
from hybridrl.master.health.monitor import Monitor
from hybridrl.master.health.process_record import ProcessRecord
from hybridrl.master.service.journal import JournaledState, JournalEntry, history
from hybridrl.master.state import events
from hybridrl.master.state.reducer import to_json, unfinished_effects
from hybridrl.master.state.tables import JOB_ENDS, WorkerPhase
from hybridrl.single_controller import cluster
from hybridrl.single_controller.processes.on_node import start_task
from hybridrl.single_controller.processes.termination import kill_named, kill_process, kill_processes, kill_run
from hybridrl.system.machine import machine_id
from hybridrl.system.process_stat import ProcessStat, read_process_stat

logger = logging.getLogger(__name__)
TICK_S, QUICK_TICK_S = 0.25, 0.02  # period of the checks; the quick one while an exit status is awaited
NODE_POLL_PERIOD_S = 1.0
PRESENT = (WorkerPhase.ALIVE, WorkerPhase.SILENT)
TRAINER_RESTART_TIMEOUT_S = 120.0  # from the loss of a trainer to the first message of the next one
HANG_S = 300.0  # a method that takes longer than this, and than three times its longest time so far, is inspected
SHUTDOWN_GRACE_S = 5.0  # for processes to exit by themselves after the end of the job


class MasterLoop:
    """Everything a master does, except for Ray's calls to it.

    Only the thread that executes `run` changes the state; other threads pass it events by `enqueue`.
    """

    def __init__(self, job_started: events.JobStarted, journal: str, hang_s: float, trainer: dict[str, Any]) -> None:
        import ray

        self.journal = JournaledState(journal)
        self._token = secrets.token_hex(16)
        self._node_host = ray.util.get_node_ip_address()
        self.server = HeartbeatServer(needed_host(self._node_host, ray.nodes()), token=self._token)
        self.machine_id = machine_id()
        self._nodes: dict[str, dict[str, Any]] = {}  # node id -> its entry in `ray.nodes()`
        run_directory = os.path.dirname(os.path.abspath(journal))
        self.monitor = Monitor(self.machine_id, self._probe_remote, self._node_loss_reason, run_directory=run_directory)
        self.hangs = HangDetector(self.monitor, self._request_stacks, journal=journal, hang_s=hang_s)
        self._queue: queue.SimpleQueue[events.JobEvent] = queue.SimpleQueue()
        self._probes: list[tuple[Any, Callable[[ProcessStat | None], None]]] = []
        self._by_slot: dict[str, Connection] = {}
        self._finished_at = 0.0
        self._trainer_deadline: float | None = None
        self._last_check = self._last_node_poll = 0.0
        self._dead_nodes: set[str] = set()
        self._apply(job_started)
        # A trainer that dies before its first message must not leave a master behind, so it joins here.
        driver = self.journal.state.driver
        if driver not in self.journal.state.workers:
            self._apply(events.WorkerJoined(driver, f"{job_started.run}/{driver}", **trainer))
        self.monitor.expect_workers(self.journal.state)
        self._execute(unfinished_effects(self.journal.state))

    @property
    def address(self) -> tuple[str, int, str]:
        return self.server.host, self.server.port, self._token

    def enqueue(self, event: events.JobEvent) -> None:
        """Queue an event for the master's thread."""
        self._queue.put(event)

    # -- the thread

    def run(self) -> None:
        """Monitor the job until it has ended and its processes are gone."""
        while not self._can_shut_down():
            try:
                self._tick()
            except Exception:  # a bug here must not leave the job unmonitored
                logger.exception("the master continues after an error of its own")
                time.sleep(TICK_S)
        self.journal.close()
        self.server.close()
        kill_run(self.journal.state.run, exclude=cluster.master_name(self.journal.state.run))

    def _tick(self) -> None:
        period_s = QUICK_TICK_S if self.monitor.awaits_exit_status or self._probes else TICK_S
        for connection, message in self.server.poll(max(0.0, self._last_check + period_s - time.monotonic())):
            self._receive(connection, message)
        while not self._queue.empty():
            self._apply(self._queue.get())
        # 1000 workers send 1000 messages per second; the checks must not run after each of them.
        if time.monotonic() < self._last_check + (QUICK_TICK_S if self.monitor.awaits_exit_status else period_s):
            return
        self._last_check = time.monotonic()
        self._poll_nodes()
        self._check_trainer_restarted()
        for event in self.monitor.check():
            self._apply(event)
            if isinstance(event, events.WorkerFailed) and event.kind in (events.Kind.DIED, events.Kind.NODE):
                self._report_lost_worker(event)
        self._collect_probes()
        if (warning := self.hangs.check()) is not None:
            logger.warning("%s: %s", warning.slot, warning.text)
            self._apply(warning)
        if not self.journal.is_durable:
            self.journal.flush()

    def _receive(self, connection: Connection, message: dict[str, Any] | None) -> None:
        slot = connection.hello["slot"]
        for event in self.monitor.handle_message(connection, message):
            self._apply(event)
        if message is None:
            return
        if "hello" in message:
            self._by_slot[slot] = connection
            unfinished = unfinished_effects(self.journal.state)
            self._execute(effect for effect in unfinished if isinstance(effect, events.StopTrainer))
        if "report" in message:
            report = {name: value for name, value in message["report"].items() if name != "number"}
            if "call_timeout" in report:
                self._on_call_timeout(**report["call_timeout"])
            else:
                self._apply(events.decode(report))
            connection.send({"acknowledge": message["report"]["number"]})
        if "stacks" in message:
            self.hangs.add_stacks(slot, message["stacks"])

    def _apply(self, event: events.JobEvent) -> None:
        self._execute(self.journal.apply(event))

    # -- effects

    def _execute(self, effects: Iterable[events.Effect]) -> None:
        for effect in effects:
            self._execute_one(effect)

    def _execute_one(self, effect: events.Effect) -> None:
        match effect:
            case events.KillProcess():
                logger.warning("killing %s (pid %d): %s", effect.slot, effect.pid, effect.reason)
                self._kill_process(effect.name, effect.pid, effect.node, effect.machine)
            case events.RecoveryNeeded():
                self._log_recovery(effect)
                if effect.slot == self.journal.state.driver:
                    self._trainer_deadline = time.monotonic() + TRAINER_RESTART_TIMEOUT_S
            case events.StopTrainer():
                self._tell_driver({"stop": effect.reason})
            case events.NotifyTrainer():
                self._tell_driver({"notice": effect.text})
            case events.ReleaseJob():
                state = self.journal.state
                logger.info("job %s is %s at step %d: %s", state.run, state.state, state.step, effect.reason)
                self._finished_at = self._finished_at or time.monotonic()

    def _tell_driver(self, message: Mapping[str, str]) -> None:
        if (driver := self._by_slot.get(self.journal.state.driver)) is not None:
            driver.send(message)

    def _log_recovery(self, effect: events.RecoveryNeeded) -> None:
        who = {events.TRAINER: "the supervisor", events.SUPERVISOR: "Ray"}.get(effect.slot, "the driver")
        logger.warning("step %d: %s; %s decides what follows", self.journal.state.step, effect.reason, who)

    def _kill_process(self, name: str, pid: int, node: str, machine_id: str) -> None:
        if machine_id == self.machine_id:
            kill_process(pid)
        else:
            threading.Thread(target=_kill_remote, args=(name, pid, node), daemon=True).start()

    def _can_shut_down(self) -> bool:
        """Return whether the job has ended and none of its workers is left.

        Kills the remaining workers when the trainer is gone, or `SHUTDOWN_GRACE_S` after the end of the job.
        """
        if not self._finished_at:
            return False
        left = [process for process in self.monitor.processes.values() if process.slot not in events.DRIVERS]
        driver_is_left = self.journal.state.driver in self.monitor.processes
        if left and driver_is_left and time.monotonic() - self._finished_at < SHUTDOWN_GRACE_S:
            return False
        for process in left:
            self._kill_process(process.name, process.pid, process.node, process.machine)
        return True

    # -- other machines

    def _probe_remote(self, process: ProcessRecord, callback: Callable[[ProcessStat | None], None]) -> None:
        self._probes.append((start_task(process.node, read_process_stat, process.pid), callback))

    def _collect_probes(self) -> None:
        import ray

        unfinished = []
        for probe, callback in self._probes:
            if not ray.wait([probe], timeout=0)[0]:
                unfinished.append((probe, callback))
                continue
            try:
                callback(cluster.get_value(probe, what="the state of a process", timeout_s=1.0))
            except (ray.exceptions.RayError, CallTimeout):
                callback(None)
        self._probes = unfinished

    def _check_trainer_restarted(self) -> None:
        """End the job if its lost trainer was not restarted in time."""
        if self._trainer_deadline is None:
            return
        if self.journal.state.workers[self.journal.state.driver].state != WorkerPhase.LOST:
            self._trainer_deadline = None
        elif self._restarter_is_gone():
            self._apply(events.JobEnded(False, "the trainer was lost, and so was the supervisor that restarts it"))
        elif time.monotonic() > self._trainer_deadline:
            reason = f"the trainer was lost, and no other one started within {TRAINER_RESTART_TIMEOUT_S:g} s"
            self._apply(events.JobEnded(False, reason))

    def _restarter_is_gone(self) -> bool:
        """Return whether the supervisor process has ended, or Ray has given up a submitted job's supervisor."""
        state = self.journal.state
        if state.supervisor_pid:
            is_local = state.workers[state.driver].machine == self.machine_id
            return is_local and not read_process_stat(state.supervisor_pid).state
        return cluster.find_actor(cluster.job_supervisor_name(state.run)) is None

    def _poll_nodes(self) -> None:
        import ray

        if time.monotonic() - self._last_node_poll < NODE_POLL_PERIOD_S:
            return
        self._last_node_poll = time.monotonic()
        self._nodes = {node["NodeID"]: node for node in ray.nodes()}
        for node_id, node in self._nodes.items():
            if not node["Alive"] and node_id not in self._dead_nodes:
                self._dead_nodes.add(node_id)
                self.monitor.mark_node_lost(node_id, f"its node {node['NodeManagerAddress']} is gone")
        if self.server.host != needed_host(self._node_host, self._nodes.values()) != LOOPBACK:
            self.server.move(self._node_host)

    def _report_lost_worker(self, lost: events.WorkerFailed) -> None:
        """Make all processes' pending calls to this worker fail now, with the reason of its end.

        Ray would take 0.5 s to notice a crashed process, and about 30 s for a machine that lost its network.
        """
        lost_connection = self._by_slot.get(lost.slot)
        hello = lost_connection.hello if lost_connection is not None else {}
        if hello.get("pid") != lost.pid or "actor" not in hello:
            return
        reason = self.journal.state.workers[lost.slot].exit_reason or lost.evidence
        for process in list(self.monitor.processes.values()):
            if process.connection is not None and process.slot != lost.slot:
                process.connection.send({"lost": {"actor": hello["actor"], "reason": reason}})

    def _node_loss_reason(self, node_id: str) -> str:
        """Return why a node is lost, or "". Connects to its raylet: Ray is slow to notice a lost network."""
        node = self._nodes.get(node_id)
        if node is None or (node["Alive"] and cluster.accepts_connections(node)):
            return ""
        return f"its node {node['NodeManagerAddress']} is gone"

    # -- calls and hangs

    def _on_call_timeout(self, call: str, silent: Mapping[str, Sequence[int]], evidence: str) -> None:
        """Record a call that missed its deadline, and start an inquiry about the process that blocks it."""
        workers = self.journal.state.workers
        overdue = [
            slot
            for its_role, ranks in silent.items()
            for slot, worker in workers.items()
            if worker.state in PRESENT and any(events.slot_matches(slot, its_role, rank) for rank in ranks)
        ]
        if not overdue:  # of another job, not set up yet, or lost
            return
        self._apply(events.WorkerFailed(events.Kind.CALL, overdue[0], workers[overdue[0]].pid, evidence))
        self.hangs.inspect_now(tuple(overdue), call)

    def _request_stacks(self, slot: str) -> None:
        if slot in self._by_slot:
            self._by_slot[slot].send({"stacks": True})


def _kill_remote(name: str, pid: int, node: str) -> None:
    kill_named([name], timeout_s=0.0)  # Ray may regard it as dead while the kernel still has it
    kill_processes([(node, pid)])


class JobMaster:
    """The Ray actor.

    Its thread starts in `__init__`, against the rule, because Ray calls nothing else when it restarts an actor.
    """

    def __init__(self, job_started: events.JobStarted, journal: str, hang_s: float, trainer: dict[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self.journal, self.started = journal, time.time()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a socket and a pidfd per worker
        self.master = MasterLoop(job_started, journal, hang_s, trainer)
        threading.Thread(target=self._run, name="master", daemon=True).start()

    def _run(self) -> None:
        import ray

        self.master.run()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def address(self) -> tuple[str, int, str]:
        """Return the address for heartbeats: host, port, and the token that authenticates a process."""
        return self.master.address

    def describe(self) -> dict[str, Any]:
        """Return the job's state and the last heartbeat of each process, as a JSON-compatible dict.

        "workers" has, by slot, what a restarted driver needs to find processes without calling them: name, pid, node,
        rank, group_size and state.
        """
        beats = {process.slot: process.beat for process in list(self.master.monitor.processes.values())}
        activities = {activity.slot: asdict(activity) for activity in self.master.monitor.activities()}
        return {
            **to_json(self.master.journal.state),
            "beats": beats,
            "activities": activities,
            "journal": self.journal,
            "is_durable": self.master.journal.is_durable,
            "pid": os.getpid(),
            "started": self.started,
        }

    def history(self) -> list[JournalEntry]:
        """Return all events of the journal, which may be on this machine alone."""
        return history(self.journal)

    def stop(self, reason: str) -> None:
        """Request the end of the job: the trainer gets SIGTERM."""
        self.master.enqueue(events.StopRequested(reason))

    def exit_reason(self, slot: str, timeout_s: float) -> str:
        """Return how a process ended, waiting at most `timeout_s`. "" if it did not end, or the reason is unknown."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            worker = self.master.journal.state.workers.get(slot)
            if worker is not None and worker.exit_reason and (worker.state != WorkerPhase.ALIVE or self.is_finished()):
                return worker.exit_reason
            time.sleep(0.02)
        return ""

    def find_blocking(self, call: str, timeout_s: float) -> tuple[str, int, str] | None:
        """Return label, rank and evidence of the process that blocks a call past its deadline.

        Waits for the end of the inquiry, at most `timeout_s`. None: it found nobody, or there was none.

        Args:
            call: `role.method`, as the call was reported.
            timeout_s: Longest wait.
        """
        until = time.monotonic() + timeout_s
        while call not in (findings := self.master.hangs.findings) and time.monotonic() < until:
            time.sleep(0.02)
        if (found := findings.get(call)) is None:
            return None
        label, _, rank = found.culprit.rpartition("-")
        return label, int(rank), found.evidence

    def work_done(self, timeout_s: float) -> list[tuple[int, int, str]]:
        """Return what each process that counts has done of its call, by its last heartbeat: done, total, unit.

        Args:
            timeout_s: As every question to a master has; it is answered at once.
        """
        return [tuple(process.beat["work"]) for process in self.master.monitor.working()]

    def is_finished(self) -> bool:
        """Return whether the job has ended."""
        return self.master.journal.state.state in JOB_ENDS
