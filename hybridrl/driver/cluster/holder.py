"""The process that starts, watches and stops the Ray cluster of this machine.

The supervisor of a driver forks it (`supervisor.py`), so that the cluster outlives the driver. It ends with the
supervisor, or when Ray's own processes are lost: Ray would let everybody wait for a minute, or for ever if they are
only frozen. The supervisor then starts the next driver on another cluster.
"""

import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from hybridrl.driver.cluster.watch import POLL_PERIOD_S, ClusterWatch, shut_down_ray, silence_stderr
from hybridrl.system.child_guard import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, descendants, prctl
from hybridrl.system.json_lines import RECEIVE_BYTES
from hybridrl.system.process_stat import StopClock, read_process_stat

logger = logging.getLogger(__name__)
KILL_TIMEOUT_S = 3.0
STOP_TIMEOUT_S, STOP_POLL_PERIOD_S = 15.0, 0.05
EXIT_LOST = 3
END_REPORTS = b"\n"  # from the supervisor to the holder


class HeldCluster:
    """The Ray cluster of this machine, started on request, as the supervisor sees it.

    Args:
        start: Starts Ray and returns its address.
        mask: Signals that the holder blocks.
        ignored: Signals that the holder and the cluster ignore.
    """

    def __init__(self, start: Callable[[], str], mask: set, *, ignored: Collection[signal.Signals]) -> None:
        self._start, self._mask, self._ignored = start, mask, ignored
        self._pid: int | None = None
        self._holder: socket.socket | None = None  # yields the address; closing it stops the cluster
        self._address: dict[str, Any] | None = None
        self._requested = self._reports_ended = False
        self._clock = StopClock()

    def request(self, *, close_fds: Sequence[int]) -> None:
        """Request the cluster's address, and start the cluster if there is none; `poll_answer` returns it.

        Args:
            close_fds: File descriptors of this process that the holder must not keep open.
        """
        self._requested = True
        if self._pid is None:
            self._fork(close_fds)

    def end_reports(self) -> None:
        """Report nothing more about the cluster: the driver has said how the program ends."""
        self._reports_ended = True
        if self._holder is not None and self._address is not None:
            with suppress(OSError):  # it has ended
                self._holder.send(END_REPORTS)

    def has_exited(self) -> bool:
        """Return whether the cluster was started and its process has ended."""
        return (
            self._pid is not None and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def kill_if_frozen(self) -> None:
        """Kill the cluster's process if it is frozen while a driver waits for its answer."""
        if self._requested and self._pid is not None and self._clock.check([self._pid]):
            logger.warning(self._clock.describe("the process that starts Ray", self._pid))
            self._requested = False  # the driver is started again, and asks again
            os.kill(self._pid, signal.SIGKILL)

    def poll_answer(self) -> dict[str, Any] | None:
        """Return the answer for `DriverLifecycle.ray_address` once per request, None while there is none."""
        if not self._requested or self._holder is None:
            return None
        if self._address is None:
            try:
                content = self._holder.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return None
            failed = {"error": "its process ended; Ray's logs are in /tmp/ray"}
            self._address = json.loads(content) if content else failed
        self._requested = False
        return self._address

    def export_address(self) -> None:
        """Set the `RAY_*` variables that connect this process to the cluster, if it runs."""
        if self._address is not None and "cluster" in self._address:
            os.environ.update(self._address["environment"] | {"RAY_ADDRESS": self._address["cluster"]})

    def stop(self) -> None:
        """Stop the cluster, and wait until its process has ended.

        A holder that is frozen, or has not ended after `STOP_TIMEOUT_S`, is killed. Its process group is killed, too:
        Ray's agents would look for their cluster for a minute.
        """
        if self._pid is None or self._holder is None:
            return
        self._holder.close()
        deadline, killed = time.monotonic() + STOP_TIMEOUT_S, False
        while not self.has_exited():
            if not killed and (self._clock.check([self._pid]) or time.monotonic() > deadline):
                if not self._reports_ended:
                    logger.warning("Ray does not stop; killing the process that holds it")
                os.kill(self._pid, signal.SIGKILL)
                killed = True
            time.sleep(STOP_POLL_PERIOD_S)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # before its id is free
        os.waitpid(self._pid, os.WNOHANG)
        self._pid = self._holder = self._address = None

    def detach(self) -> None:
        """Close this forked process's end, so that only the parent decides when the cluster stops."""
        if self._holder is not None:
            self._holder.close()
        self._pid = self._holder = None

    def _fork(self, close_fds: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for descriptor in close_fds:
                os.close(descriptor)
            os.setpgid(0, 0)
            hold_cluster(self._start, theirs, mask=self._mask, ignored=self._ignored)
        theirs.close()
        ours.setblocking(False)
        self._pid, self._holder, self._address = pid, ours, None


# -- in the holder


def hold_cluster(
    start: Callable[[], str], parent: socket.socket, *, mask: set, ignored: Collection[signal.Signals]
) -> NoReturn:
    """Start a cluster, and stop it when the parent is gone or the cluster is lost.

    Args:
        start: Starts Ray and returns its address.
        parent: Gets the answer for `DriverLifecycle.ray_address`. It ends when the parent has closed its end or has
            died.
        mask: Signals to block.
        ignored: Signals that this process and the cluster ignore.
    """
    # Ray's processes inherit ignored signals, and Ray stops them by SIGTERM: do not ignore that one yet.
    for number in {*ignored} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # a holder that is frozen then finds that its parent is gone
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # a worker whose raylet is gone stays below this process
    started = threading.Event()
    threading.Thread(target=_end_early, args=(parent, started), name="early-end", daemon=True).start()
    answer = json.dumps(_answer(start)).encode()
    with suppress(OSError):  # the parent is gone, which `_wait` sees too
        parent.sendall(answer)
    started.set()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lost = _wait(parent, ClusterWatch())
    if not lost:
        shut_down_ray()
    _kill_all()
    os._exit(EXIT_LOST if lost else 0)  # skips the exit handlers of imported libraries


def _end_early(parent: socket.socket, started: threading.Event) -> None:
    """End this process if the parent is gone before the cluster has started.

    The start may take minutes or fail.
    """
    while not started.wait(POLL_PERIOD_S):
        if select.select([parent], [], [], 0)[0]:
            _kill_all()
            time.sleep(POLL_PERIOD_S)  # the main thread may have been starting another process
            _kill_all()
            os._exit(0)


def _answer(start: Callable[[], str]) -> dict[str, object]:
    try:
        address = start()
    except Exception as error:  # the driver raises it
        return {"error": " ".join(str(error).split())}
    return {
        "cluster": address,
        "environment": {name: value for name, value in os.environ.items() if name.startswith("RAY_")},
    }


def _wait(parent: socket.socket, watch: ClusterWatch) -> bool:
    """Return whether the cluster was lost; False if the parent is gone."""
    while True:
        if select.select([parent], [], [], POLL_PERIOD_S)[0]:
            if not _is_end_of_reports(parent):
                return False
            silence_stderr()
        watch.reap_orphans()
        if lost := watch.check():
            logger.warning("%s has ended; stopping the Ray cluster of this machine", lost)
            return True


def _is_end_of_reports(parent: socket.socket) -> bool:
    """Return whether the parent has said so; False if it is gone."""
    try:
        return parent.recv(RECEIVE_BYTES) == END_REPORTS
    except ConnectionResetError:  # it has left the answer unread
        return False


def _kill_all() -> None:
    """Kill everything below this process, frozen workers too."""
    until = time.monotonic() + KILL_TIMEOUT_S
    while (pids := [pid for pid in descendants() if read_process_stat(pid).state]) and time.monotonic() < until:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
