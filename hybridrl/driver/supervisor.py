"""Supervisor: run the driver in a child process, and start it again when it is lost.

    code = supervise(train, lifecycle)      # train() -> exit code; runs in a forked process, once per attempt

A driver is lost when it ends without `lifecycle.report_exit`: killed, out of memory, crashed in a library, or stopped
by SIGSTOP. Its worker processes keep running. The next driver reattaches to them and retries the interrupted step
(`trainer/recovery/snapshots.py`). A driver that requests a new job (a node is gone, a role died repeatedly) is
followed by one that starts everything again from the last checkpoint. `failure_policy.py` limits both. Every other end,
an exception or Ctrl-C, ends the program.

Runs in the parent process of the driver (`main_ppo`). The parent has imported what the driver needs and started
nothing, so a fork is a driver that is ready. For the same reason a separate child process holds the local Ray cluster;
it stops the cluster when the parent is gone. Linux only, because it needs the sender of a signal: elsewhere there is no
supervisor, and a lost driver ends the run.
"""

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hybridrl.driver.cluster_holder import hold_cluster
from hybridrl.driver.lifecycle import DriverLifecycle
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind, Source
from hybridrl.system.child_guard import PR_SET_PDEATHSIG, prctl
from hybridrl.system.json_lines import MessageReader, send_message
from hybridrl.system.process_stat import StopClock

logger = logging.getLogger(__name__)
POLL_PERIOD_S = 0.05
FORWARD_DELAY_S = 0.3  # a signal to the parent is forwarded unless the driver received it too within this time
CLUSTER_STOP_TIMEOUT_S = 15.0
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def can_supervise() -> bool:
    """Return whether this process can supervise a driver.

    It must be able to read the sender of a signal, and have one thread only, because a fork loses all others.
    """
    if not hasattr(signal, "sigtimedwait"):
        return False
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        logger.info("a thread runs already (%s): no supervisor, a lost driver ends the run", ", ".join(others))
    return not others


def supervise(
    start: Callable[[], int],
    lifecycle: DriverLifecycle,
    *,
    start_cluster: Callable[[], str] = lambda: "",
    report_end: Callable[[str, Decision], None] = lambda run_id, decision: None,
) -> int:
    """Run a driver in child processes and return its exit code.

    A lost driver is started again.

    Args:
        start: The driver; returns its exit code.
        lifecycle: The driver's; connected to this supervisor in the child process.
        start_cluster: Starts a Ray cluster that ends with the calling process, and returns its address. Called in a
            process of its own when a driver calls `DriverLifecycle.ray_address`.
        report_end: Called with the run id and the decision that ends the program because a budget is spent. Runs in
            this process, after the last driver; RAY_ADDRESS names the cluster if there is one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED_SIGNALS, signal.SIGCHLD})
    supervisor = _Supervisor(start, lifecycle, _Cluster(start_cluster, before), before, report_end)
    try:
        return supervisor.run()
    finally:
        supervisor.cluster.stop()
        while signal.sigtimedwait(FORWARDED_SIGNALS, 0) is not None:
            pass  # the run has ended: a signal that came too late changes nothing
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Driver:
    """State of one driver process, as the supervisor tracks it."""

    pid: int
    channel: socket.socket
    signals: int  # file descriptor from which to read the numbers of the signals that the driver received
    reader: MessageReader = field(default_factory=MessageReader)
    received_signals: dict[int, float] = field(default_factory=dict)  # signal -> `time.monotonic` of its arrival
    exit_code: int | None = None  # from the driver's exit report
    new_job_reason: str | None = None
    is_killed: bool = False  # by the supervisor


class _Supervisor:
    def __init__(
        self,
        start: Callable[[], int],
        lifecycle: DriverLifecycle,
        cluster: "_Cluster",
        mask: set,
        report_end: Callable[[str, Decision], None],
    ) -> None:
        self._start, self._lifecycle, self.cluster, self._mask = start, lifecycle, cluster, mask
        self._report_end = report_end
        self._run_id, self._attempt = uuid.uuid4().hex[:6], 1
        self._budgets = Budgets(step=-1)  # its step is the newest completed one; 0 completes before the first
        self._decision: Decision | None = None  # the newest one
        self._stop_requested = False
        self._to_forward: list[tuple[float, int]] = []

    def run(self) -> int:
        while True:
            driver = self._fork()
            status = self._wait(driver)
            self._receive(driver)
            driver.channel.close()
            os.close(driver.signals)
            if lost_cluster := self.cluster.has_exited():
                self.cluster.stop()
            code = self._exit_code_or_restart(driver, status, lost_cluster=lost_cluster)
            if code is not None:
                return code

    # -- one attempt

    def _fork(self) -> _Driver:
        parent_end, driver_end = socket.socketpair()
        signals, driver_signals = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            parent_end.close()
            os.close(signals)
            self.cluster.detach()
            self._run_driver(driver_end, driver_signals)
        driver_end.close()
        os.close(driver_signals)
        parent_end.setblocking(False)
        os.set_blocking(signals, False)
        return _Driver(pid, parent_end, signals)

    def _run_driver(self, channel: socket.socket, signals: int) -> NoReturn:
        """Run the driver in the forked process, and exit as a program does."""
        prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # a driver that is frozen then finds that its supervisor is gone
        os.set_blocking(signals, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._lifecycle.attach_supervisor(
            channel, attempt=self._attempt, run_id=self._run_id, restarted_by=self._decision
        )
        code = 1
        try:
            code = self._start()
        finally:
            self._lifecycle.report_exit(code)
        raise SystemExit(code)

    def _wait(self, driver: _Driver) -> int:
        """Wait until the driver has ended, and return its wait status."""
        clock = StopClock()
        while True:
            info = signal.sigtimedwait({*FORWARDED_SIGNALS, signal.SIGCHLD}, POLL_PERIOD_S)
            if info is not None and info.si_signo in FORWARDED_SIGNALS:
                self._stop_requested = True
                if info.si_code <= 0:  # sent by a process; the terminal sends to every process of the program itself
                    self._to_forward.append((time.monotonic(), info.si_signo))
            self._receive(driver)
            self._forward_signals(driver)
            if self.cluster.has_exited() and not driver.is_killed:
                # Ray would let the driver wait for a minute.
                self._kill(driver, "the Ray cluster of this machine was lost; killing the driver that uses it")
            pid, status = os.waitpid(driver.pid, os.WNOHANG)
            if pid:
                return status
            if clock.check([driver.pid]) and not driver.is_killed:
                self._kill(driver, clock.describe("the driver", driver.pid))

    def _kill(self, driver: _Driver, why: str) -> None:
        logger.warning(why)
        os.kill(driver.pid, signal.SIGKILL)
        driver.is_killed = True

    def _forward_signals(self, driver: _Driver) -> None:
        """Forward signals that only the parent received.

        A signal to the process group reached the driver, too.
        """
        for at, number in [entry for entry in self._to_forward if time.monotonic() - entry[0] > FORWARD_DELAY_S]:
            self._to_forward.remove((at, number))
            if driver.received_signals.get(number, 0.0) < at - FORWARD_DELAY_S:
                os.kill(driver.pid, number)

    def _receive(self, driver: _Driver) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(driver.signals, 4096):
                driver.received_signals[number] = time.monotonic()
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := driver.channel.recv(65536):
                for message in driver.reader.messages(data):
                    self._handle(driver, message)
        if (answer := self.cluster.poll_answer()) is not None:
            with contextlib.suppress(OSError):
                send_message(driver.channel, answer)

    def _handle(self, driver: _Driver, message: dict[str, Any]) -> None:
        if "step" in message:
            self._budgets.on_step(message["step"])
        if "cluster" in message:
            self.cluster.request(close_fds=(driver.channel.fileno(), driver.signals))
        driver.new_job_reason = message.get("new_job", driver.new_job_reason)
        driver.exit_code = message.get("exit", driver.exit_code)

    # -- between two attempts

    def _exit_code_or_restart(self, driver: _Driver, status: int, *, lost_cluster: bool) -> int | None:
        """Return the program's exit code, or None after preparing another attempt."""
        code = os.waitstatus_to_exitcode(status)
        if driver.exit_code is not None and driver.new_job_reason is None:
            return driver.exit_code
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code} without an exit report"
        code = code if code >= 0 else 128 - code
        self._decision = self._decide(how, driver.new_job_reason, lost_cluster=lost_cluster)
        if self._stop_requested:
            return code or 1
        logger.warning("%s", self._decision)
        if not self._decision.is_granted:
            self.cluster.export_address()
            self._report_end(self._run_id, self._decision)
            return code or 1
        self._attempt += 1
        if driver.new_job_reason is not None:
            self._run_id = uuid.uuid4().hex[:6]
            self.cluster.stop()
        return None

    def _decide(self, how: str, new_job_reason: str | None, *, lost_cluster: bool) -> Decision:
        """Return what follows the loss of a driver.

        A driver that requests a new job counts as lost, too.
        """
        step, driver = max(self._budgets.step, 0), f"the driver (attempt {self._attempt})"
        # A snapshot is lost with its cluster.
        source = Source.CHECKPOINT if lost_cluster else None
        snapshot = "the newest checkpoint" if lost_cluster else f"the snapshot of step {step}"
        origin = snapshot if self._budgets.step >= 0 else ""
        what = f"{driver} was lost after step {step} ({how})"
        lost = self._budgets.spend(
            Failure(FailureKind.DRIVER_LOST, what, target="the driver", origin=origin, source=source)
        )
        if new_job_reason is None:
            return lost
        what = f"{driver} cannot repair the job after step {step} ({new_job_reason})"
        failure = Failure(FailureKind.JOB_UNREPAIRABLE, what, target="a new job", origin="the newest checkpoint")
        new_job = self._budgets.spend(failure)
        return new_job if lost.is_granted or not new_job.is_granted else lost


class _Cluster:
    """The Ray cluster of this machine, started on request.

    A process that does nothing else holds it.
    """

    def __init__(self, start: Callable[[], str], mask: set) -> None:
        self._start, self._mask = start, mask
        self._pid: int | None = None
        self._ready_fd, self._alive_fd = -1, -1  # yields the address; closing it stops the cluster
        self._address: dict[str, Any] | None = None
        self._requested = False

    def request(self, *, close_fds: Sequence[int]) -> None:
        """Request the cluster's address, and start the cluster if there is none; `poll_answer` returns it.

        Args:
            close_fds: File descriptors of the parent that the cluster's process must not hold open.
        """
        self._requested = True
        if self._pid is None:
            self._fork(close_fds)

    def has_exited(self) -> bool:
        """Return whether the cluster was started and its process has ended."""
        return (
            self._pid is not None and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def poll_answer(self) -> dict[str, Any] | None:
        """Return the answer for `DriverLifecycle.ray_address` once per request, None while there is none."""
        if not self._requested:
            return None
        if self._address is None:
            try:
                content = os.read(self._ready_fd, 65536)
            except BlockingIOError:
                return None
            failed = {"error": "its process ended; Ray's logs are in /tmp/ray"}
            self._address = json.loads(content) if content else failed
        self._requested = False
        return self._address

    def export_address(self) -> None:
        """Set the `RAY_*` variables that connect this process to the cluster, if it runs."""
        if self._pid is not None and self._address is not None and "cluster" in self._address:
            os.environ.update(self._address["environment"] | {"RAY_ADDRESS": self._address["cluster"]})

    def stop(self) -> None:
        """Stop the cluster and wait until its process has ended; kill that after `CLUSTER_STOP_TIMEOUT_S`."""
        if self._pid is None:
            return
        os.close(self._alive_fd)
        deadline = time.monotonic() + CLUSTER_STOP_TIMEOUT_S
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                logger.warning(
                    "Ray did not stop within %g s; killing the process that holds it", CLUSTER_STOP_TIMEOUT_S
                )
                os.kill(self._pid, signal.SIGKILL)
                deadline = math.inf
            time.sleep(POLL_PERIOD_S)
        os.close(self._ready_fd)
        self._pid, self._address = None, None

    def detach(self) -> None:
        """Close this forked process's ends, so that only the parent decides when the cluster stops."""
        if self._pid is not None:
            os.close(self._alive_fd)
            os.close(self._ready_fd)
            self._pid = None

    def _fork(self, close_fds: Sequence[int]) -> None:
        ready, child_ready = os.pipe()
        child_alive, alive = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            for descriptor in (alive, *close_fds):
                os.close(descriptor)
            hold_cluster(self._start, ready=child_ready, alive=child_alive, mask=self._mask, ignored=FORWARDED_SIGNALS)
        os.close(child_ready)
        os.close(child_alive)
        os.set_blocking(ready, False)
        self._pid, self._ready_fd, self._alive_fd, self._address = pid, ready, alive, None
