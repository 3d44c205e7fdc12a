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
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hybridrl.driver.cluster.holder import HeldCluster
from hybridrl.driver.run_context import DriverLifecycle
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind, Source
from hybridrl.system.child_guard import PR_SET_PDEATHSIG, prctl
from hybridrl.system.json_lines import MessageReader, send_message
from hybridrl.system.process_stat import StopClock

logger = logging.getLogger(__name__)
POLL_PERIOD_S = 0.05
FORWARD_DELAY_S = 0.3  # a signal to the parent is forwarded unless the driver received it too within this time
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
    cluster = HeldCluster(start_cluster, before, ignored=FORWARDED_SIGNALS)
    supervisor = _Supervisor(start, lifecycle, cluster, before, report_end)
    try:
        return supervisor.run()
    finally:
        cluster.stop()
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

    @property
    def ends_program(self) -> bool:
        """Whether the driver has reported how the program ends. It has said why."""
        return self.exit_code is not None and self.new_job_reason is None


class _Supervisor:
    def __init__(
        self,
        start: Callable[[], int],
        lifecycle: DriverLifecycle,
        cluster: HeldCluster,
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
            lost_cluster = self.cluster.has_exited()  # before what a driver reported earlier is read
            self._receive(driver)
            self.cluster.kill_if_frozen()
            self._forward_signals(driver)
            if lost_cluster and not driver.is_killed:
                # Ray would let the driver wait for a minute.
                self._kill(driver, "the Ray cluster of this machine was lost; killing the driver that uses it")
            pid, status = os.waitpid(driver.pid, os.WNOHANG)
            if pid:
                return status
            if clock.check([driver.pid]) and not driver.is_killed:
                self._kill(driver, clock.describe("the driver", driver.pid))

    def _kill(self, driver: _Driver, why: str) -> None:
        if not driver.ends_program:
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
        if driver.ends_program:
            self.cluster.end_reports()

    # -- between two attempts

    def _exit_code_or_restart(self, driver: _Driver, status: int, *, lost_cluster: bool) -> int | None:
        """Return the program's exit code, or None after preparing another attempt."""
        code = os.waitstatus_to_exitcode(status)
        if driver.ends_program:
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
