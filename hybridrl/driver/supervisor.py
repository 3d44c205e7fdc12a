"""Keeps a driver running: the program forks, the child is the driver, and the parent starts the next one when that is
lost.

    code = keep_running(train)      # train() -> exit code, in a process of its own, as often as it takes

A driver is lost when it ends without a word: killed, out of memory, crashed in a library, stopped by SIGSTOP. The next
one takes up the worker processes, which live on, and goes on at the step that was lost
(`trainer/recovery/step_snapshot.py`). A driver that says that the job itself is lost (a machine is gone, a role died
again and again) is followed by one that starts everything anew, from the last commit. Whatever else a driver ends with,
an exception or Ctrl-C, is the end of the program.

The parent has imported what the driver needs and started nothing, so a fork is a driver that is ready; for the same
reason the Ray cluster
of a program that has none is kept by a process of its own, until the parent is gone. Linux only, as it takes signals
with their senders: elsewhere there is no parent, and a lost driver ends the run.
"""

import contextlib
import json
import logging
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

from hybridrl.driver.lifecycle import LIFE

logger = logging.getLogger(__name__)
MOST_LOSSES = 3  # drivers, one after another, between two steps
FROZEN_S = 4.5  # stopped by SIGSTOP so long, while the parent is not: that is not Ctrl-Z
LOOK_S = 0.05
PASS_ON_S = 0.3  # a signal that the driver has got itself meanwhile is not passed on
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def can_keep_running() -> bool:
    """Return whether this process hears who sent a signal, and may be forked: threads would end in the fork."""
    if not hasattr(signal, "sigtimedwait"):
        return False
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        logger.info("a thread runs already (%s): nobody starts the driver again if it dies", ", ".join(others))
    return not others


def keep_running(start: Callable[[], int], *, start_cluster: Callable[[], str] = lambda: "") -> int:
    """Return the exit code of the driver `start`, which runs in a process of its own and is started again when it is
    lost.

    start_cluster: starts a Ray cluster that ends with the process that calls it, and returns its address; see
    `Life.cluster`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDINGS, signal.SIGCHLD})
    supervisor = _Supervisor(start, _Cluster(start_cluster, before), before)
    try:
        return supervisor.run()
    finally:
        supervisor.cluster.end()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Driver:
    """A life of the driver, as its parent sees it."""

    pid: int
    channel: socket.socket
    signals: int  # file descriptor: numbers of the signals that it got
    received: bytes = b""
    heard: dict[int, float] = field(default_factory=dict)  # signal -> when the driver got it
    end: int | None = None  # the exit code that it announced
    again: str | None = None
    stopped_at: float | None = None
    is_ended: bool = False  # by the parent


class _Supervisor:
    def __init__(self, start: Callable[[], int], cluster: "_Cluster", mask: set) -> None:
        self._start, self.cluster, self._mask = start, cluster, mask
        self._run, self._life = uuid.uuid4().hex[:6], 1
        self._step = self._given_up_at = -1
        self._losses = 0
        self._told_to_end = False
        self._to_pass_on: list[tuple[float, int]] = []

    def run(self) -> int:
        while True:
            driver = self._fork()
            status = self._watch(driver)
            self._hear(driver)
            driver.channel.close()
            os.close(driver.signals)
            if self.cluster.is_lost():
                self.cluster.end()
            code = self._what_next(driver, status)
            if code is not None:
                return code

    # -- one life

    def _fork(self) -> _Driver:
        mine, its = socket.socketpair()
        signals, its_signals = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            mine.close()
            os.close(signals)
            self.cluster.leave()
            self._be_driver(its, its_signals)
        its.close()
        os.close(its_signals)
        mine.setblocking(False)
        os.set_blocking(signals, False)
        return _Driver(pid, mine, signals)

    def _be_driver(self, channel: socket.socket, signals: int) -> NoReturn:
        """Run the driver, and end this process as a program ends."""
        os.set_blocking(signals, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        LIFE.begin(channel, number=self._life, run=self._run)
        code = 1
        try:
            code = self._start()
        finally:
            LIFE.end(code)
        raise SystemExit(code)

    def _watch(self, driver: _Driver) -> int:
        """Return the driver's wait status, when it has ended."""
        while True:
            info = signal.sigtimedwait({*ENDINGS, signal.SIGCHLD}, LOOK_S)
            if info is not None and info.si_signo in ENDINGS:
                self._told_to_end = True
                if (
                    info.si_code <= 0
                ):  # by a process; what the terminal sends goes to every process of the program anyway
                    self._to_pass_on.append((time.monotonic(), info.si_signo))
            self._hear(driver)
            self._pass_on(driver)
            if self.cluster.is_lost() and not driver.is_ended:
                self._end(
                    driver, "the Ray cluster of this machine was lost, and its driver is ended"
                )  # Ray would wait for a minute
            pid, status = os.waitpid(driver.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                return status
            if pid:
                frozen = os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
                driver.stopped_at = time.monotonic() if frozen else None
            elif driver.stopped_at is not None and time.monotonic() - driver.stopped_at > FROZEN_S:
                self._end(driver, f"the driver has been stopped (SIGSTOP) for {FROZEN_S:g} s; it is ended")
                driver.stopped_at = None

    def _end(self, driver: _Driver, why: str) -> None:
        logger.warning(why)
        os.kill(driver.pid, signal.SIGKILL)
        driver.is_ended = True

    def _pass_on(self, driver: _Driver) -> None:
        """Give the driver what only the parent got.

        A signal for the whole group of processes has reached it already.
        """
        for at, number in [entry for entry in self._to_pass_on if time.monotonic() - entry[0] > PASS_ON_S]:
            self._to_pass_on.remove((at, number))
            if driver.heard.get(number, 0.0) < at - PASS_ON_S:
                os.kill(driver.pid, number)

    def _hear(self, driver: _Driver) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(driver.signals, 4096):
                driver.heard[number] = time.monotonic()
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := driver.channel.recv(65536):
                *lines, driver.received = (driver.received + data).split(b"\n")
                for line in lines:
                    self._obey(driver, json.loads(line))
        if (answer := self.cluster.answer()) is not None:
            with contextlib.suppress(OSError):
                driver.channel.sendall(json.dumps(answer).encode() + b"\n")

    def _obey(self, driver: _Driver, word: dict[str, Any]) -> None:
        if "step" in word and word["step"] > self._step:
            self._step, self._losses = word["step"], 0
        if "cluster" in word:
            self.cluster.want(beside=(driver.channel.fileno(), driver.signals))
        driver.again = word.get("again", driver.again)
        driver.end = word.get("end", driver.end)

    # -- between two lives

    def _what_next(self, driver: _Driver, status: int) -> int | None:
        """Return the program's exit code, or None for another life."""
        code = os.waitstatus_to_exitcode(status)
        if driver.end is not None and driver.again is None:
            return driver.end
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code < 0
            else f"it ended by itself with exit code {code}, without a word"
        )
        code = code if code >= 0 else 128 - code
        self._losses += 1
        if self._told_to_end:
            return code or 1
        if driver.again is not None and self._given_up_at == self._step:
            logger.warning("it is the second time after step %d; what comes again is no accident", self._step)
            return code or 1
        if self._losses > MOST_LOSSES:
            logger.warning(
                "the driver was lost (%s), %d times since step %d ended; what comes so often is no accident",
                how,
                self._losses,
                self._step,
            )
            return code or 1
        self._life += 1
        if driver.again is not None:
            self._given_up_at = self._step
            logger.warning("starting the job anew, from its last commit")
            self._run = uuid.uuid4().hex[:6]
            self.cluster.end()
        else:
            logger.warning("the driver was lost (%s) after step %d; starting it again", how, max(self._step, 0))
        return None


class _Cluster:
    """The Ray cluster of this machine, in the hands of a process that does nothing else. Started when it is wanted."""

    def __init__(self, start: Callable[[], str], mask: set) -> None:
        self._start, self._mask = start, mask
        self._pid: int | None = None
        self._ready, self._alive = -1, -1  # read its address here; closing the other ends the cluster
        self._address: dict[str, Any] | None = None
        self._wanted = False

    def want(self, *, beside: Sequence[int]) -> None:
        """Have the cluster, which may be there; `answer` returns it.

        beside: file descriptors that are not its process's to hold open.
        """
        self._wanted = True
        if self._pid is None:
            self._fork(beside)

    def is_lost(self) -> bool:
        """Whether there was one, and its process has ended."""
        return (
            self._pid is not None and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def answer(self) -> dict[str, Any] | None:
        """Return, once for each time that it was wanted, what `Life.cluster` reads, as soon as it is known."""
        if not self._wanted:
            return None
        if self._address is None:
            try:
                said = os.read(self._ready, 65536)
            except BlockingIOError:
                return None
            self._address = json.loads(said) if said else {"error": "its process ended; Ray's logs are in /tmp/ray"}
        self._wanted = False
        return self._address

    def end(self) -> None:
        """End the cluster, and wait for it."""
        if self._pid is None:
            return
        os.close(self._alive)
        os.waitpid(self._pid, 0)
        os.close(self._ready)
        self._pid, self._address = None, None

    def leave(self) -> None:
        """In a fork: leave it to the parent when the cluster ends."""
        if self._pid is not None:
            os.close(self._alive)
            os.close(self._ready)
            self._pid = None

    def _fork(self, beside: Sequence[int]) -> None:
        ready, its_ready = os.pipe()
        its_alive, alive = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            for descriptor in (alive, *beside):
                os.close(descriptor)
            _be_cluster(self._start, its_ready, its_alive, self._mask)
        os.close(its_ready)
        os.close(its_alive)
        os.set_blocking(ready, False)
        self._pid, self._ready, self._alive, self._address = pid, ready, alive, None


def _be_cluster(start: Callable[[], str], ready: int, alive: int, mask: set) -> NoReturn:
    for number in {*ENDINGS} - {
        signal.SIGTERM
    }:  # Ray's processes inherit what is ignored, and Ray ends them by SIGTERM
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    answer: dict[str, Any]
    try:
        answer = {
            "cluster": start(),
            "environment": {name: value for name, value in os.environ.items() if name.startswith("RAY_")},
        }
    except Exception as error:  # the driver says it
        answer = {"error": " ".join(str(error).split())}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(ready, json.dumps(answer).encode())
    os.read(alive, 1)  # until nobody holds the other end
    import ray

    ray.shutdown()
    os._exit(0)  # what else this process has imported need not be taken apart
