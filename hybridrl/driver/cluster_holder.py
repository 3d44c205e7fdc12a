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
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

from hybridrl.driver.cluster_watch import POLL_PERIOD_S, ClusterWatch, shut_down_ray
from hybridrl.system.child_guard import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, descendants, prctl
from hybridrl.system.process_stat import read_process_stat

logger = logging.getLogger(__name__)
KILL_TIMEOUT_S = 3.0
EXIT_LOST = 3


def hold_cluster(
    start: Callable[[], str], *, ready: int, alive: int, mask: set, ignored: Collection[signal.Signals]
) -> NoReturn:
    """Start a cluster, and stop it when the parent is gone or the cluster is lost.

    Runs in a process of its own.

    Args:
        start: Starts Ray and returns its address.
        ready: File descriptor that gets the answer for `DriverLifecycle.ray_address`.
        alive: File descriptor that becomes readable when the parent has closed its end or has died.
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
    threading.Thread(target=_end_early, args=(alive, started), name="early-end", daemon=True).start()
    os.write(ready, json.dumps(_answer(start)).encode())
    started.set()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lost = _wait(alive, ClusterWatch())
    if not lost:
        shut_down_ray()
    _kill_all()
    os._exit(EXIT_LOST if lost else 0)  # skips the exit handlers of imported libraries


def _end_early(alive: int, started: threading.Event) -> None:
    """End this process if the parent is gone before the cluster has started.

    The start may take minutes or fail.
    """
    while not started.wait(POLL_PERIOD_S):
        if select.select([alive], [], [], 0)[0]:
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


def _wait(alive: int, watch: ClusterWatch) -> bool:
    """Return whether the cluster was lost; False if the parent is gone."""
    while not select.select([alive], [], [], POLL_PERIOD_S)[0]:
        watch.reap_orphans()
        if lost := watch.check():
            logger.warning("%s has ended; stopping the Ray cluster of this machine", lost)
            return True
    return False


def _kill_all() -> None:
    """Kill everything below this process, frozen workers too."""
    until = time.monotonic() + KILL_TIMEOUT_S
    while (pids := [pid for pid in descendants() if read_process_stat(pid).state]) and time.monotonic() < until:
        for pid in pids:
            _kill(pid)
        time.sleep(0.02)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
