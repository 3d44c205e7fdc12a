"""Watch the Ray cluster that this process started on this machine, and kill what is frozen in it.

Ray notices an ended process of its own within a minute, a frozen one never. Used by the cluster holder, and by programs
without a supervisor: these end with the cluster, because nothing is left to train with.
"""

import atexit
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hybridrl.driver.signals import is_terminating
from hybridrl.driver.terminal import show_error
from hybridrl.system.child_guard import children_of
from hybridrl.system.process_stat import StopClock, read_process_stat

logger = logging.getLogger(__name__)
POLL_PERIOD_S = 0.5
FREEZE_TIMEOUT_S = 6.0  # later than the master, which reports the workers that it kills
TERMINATION_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 8.0
EXIT_CODE = 1  # of a program that ends with its cluster
ESSENTIAL = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}  # as the kernel names them
STDERR = 2
LEFTOVERS = Path(__file__).with_name("leftovers.py")
EXITING = threading.Event()  # set when the interpreter of a program with `watch_in_thread` ends


class ClusterWatch:
    """Finds lost and frozen processes of the cluster whose GCS and raylet are children of this process."""

    def __init__(self) -> None:
        self._others = {*children_of(os.getpid())}
        self._essential = {pid: name for pid in self._others if (name := ESSENTIAL.get(_command_name(pid)))}
        self._pidfds = _pidfds(self._essential)
        self._clock = StopClock(FREEZE_TIMEOUT_S)
        self._newest: list[int] = []

    def sleep(self) -> None:
        """Sleep for `POLL_PERIOD_S`, or until an essential process ends, where the kernel tells."""
        if self._pidfds:
            select.select(self._pidfds, [], [], POLL_PERIOD_S)
        else:
            time.sleep(POLL_PERIOD_S)

    def check(self) -> str:
        """Kill what is frozen; return what is lost, "" if the cluster is there.

        Call it after every `sleep`. A frozen essential process is lost, but not killed: a program's own Ray library
        would end the program at its next call.
        """
        if lost := next((name for pid, name in self._essential.items() if not read_process_stat(pid).state), ""):
            return lost
        self._newest = self._processes()
        for pid in self._clock.check(self._newest):
            if _is_ending():
                silence_stderr()  # hide what Ray prints about the processes that we kill
            else:
                logger.warning(self._clock.describe(_command_name(pid), pid))
            if pid in self._essential:
                return self._essential[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ""

    @property
    def newest(self) -> list[int]:
        """Process ids of the cluster, as the newest check has found them."""
        return list(self._newest)

    def kill_rest(self) -> None:
        """Kill what the newest check has found in the cluster.

        Ray's agents outlive it by more than a minute.
        """
        for pid in self._newest:
            with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"ray" in file.read():  # not another program that has the id now
                    os.kill(pid, signal.SIGKILL)

    def reap_orphans(self) -> None:
        """Collect ended processes that the kernel gave to this one; only for a process that starts nothing else."""
        for pid in {*children_of(os.getpid())} - self._others:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _processes(self) -> list[int]:
        found = waiting = list(self._essential)
        while waiting:
            waiting = [below for pid in waiting for below in children_of(pid)]
            found = [*found, *waiting]
        return found


def watch_in_thread() -> None:
    """Watch the cluster of this process, and end the process with one error when the cluster is lost.

    The end is immediate: Ray calls of other threads would wait for a minute, until Ray itself ends the process.
    """
    watch, leftovers = ClusterWatch(), Leftovers()

    def run() -> None:
        while not (lost := watch.check()):
            leftovers.update(watch.newest)
            watch.sleep()
        if _is_ending():
            return watch.kill_rest()
        if is_terminating():  # the same signal may have ended Ray's processes
            watch.kill_rest()
            time.sleep(TERMINATION_TIMEOUT_S)  # the main thread says what it has committed
        _end_program(lost, watch)

    atexit.register(EXITING.set)  # called before Ray's own exit handler, which was registered when Ray was imported
    threading.Thread(target=run, name="cluster-watch", daemon=True).start()


class Leftovers:
    """Handle of `leftovers.py`, which kills what a killed program leaves of its cluster.

    It ends with this process.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", str(LEFTOVERS)]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._sent: list[int] = []

    def update(self, pids: list[int]) -> None:
        """Name the processes of the cluster again, if they are others."""
        if pids == self._sent or self._program.stdin is None:
            return
        self._sent = pids
        with suppress(OSError):  # someone has killed it; nothing else depends on it
            self._program.stdin.write(" ".join(map(str, pids)) + "\n")
            self._program.stdin.flush()


def shut_down_ray() -> None:
    """Stop Ray as it wants to be stopped, for `SHUTDOWN_TIMEOUT_S` at most."""
    if (ray := sys.modules.get("ray")) is None:
        return
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(SHUTDOWN_TIMEOUT_S)


def silence_stderr() -> None:
    """Redirect stderr to /dev/null, so that our error stays the last line."""
    with suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), STDERR)


def _is_ending() -> bool:
    """Return whether this program has begun to exit, or has shut Ray down."""
    ray = sys.modules.get("ray")
    return EXITING.is_set() or (ray is not None and not ray.is_initialized())


def _end_program(lost: str, watch: ClusterWatch) -> NoReturn:
    """End this process without its exit handlers, some of which call Ray; and Ray's processes that it started.

    The error comes first: Ray's library ends this process, too, when one of its calls meets the lost raylet.
    """
    node = getattr(sys.modules["ray"]._private.worker, "_global_node", None)
    logs = "/tmp/ray" if node is None else node.get_logs_dir_path()
    text = (
        f"error: {lost} on this machine has ended, and the workers and the master with it; Ray's logs are in {logs}; "
        "start the same command again; training resumes from what it has committed\n"
    )
    with suppress(Exception):  # whoever read it may be gone; this process must end all the same
        sys.stdout.flush()
    with suppress(Exception):
        show_error(text)
    silence_stderr()
    watch.kill_rest()
    if node is not None:
        with suppress(Exception):  # whatever Ray says about what is left of it
            node.kill_all_processes(check_alive=False)
    os._exit(EXIT_CODE)


def _pidfds(pids: Iterable[int]) -> list[int]:
    """Return file descriptors that become readable when these processes end; none where the kernel has none."""
    with suppress(OSError, AttributeError):
        return [os.pidfd_open(pid) for pid in pids]
    return []


def _command_name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""
