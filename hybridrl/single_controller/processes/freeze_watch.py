"""`FreezeWatch`: kills a process of this machine that is stopped by SIGSTOP, so that others notice its loss.

Nobody else would notice where no heartbeat is expected: connections of a stopped process stay open. Runs in the driver,
a thread for each process that is watched: the master, and the snapshot store.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from hybridrl.single_controller.processes.termination import kill_process
from hybridrl.system.machine import machine_id
from hybridrl.system.process_stat import STOPPED, read_process_stat

logger = logging.getLogger(__name__)
POLL_PERIOD_S = 0.5
# 4.5 s, as for the processes that the master watches. Ctrl-Z stops the driver, too, which then counts nothing.
MAX_STOPPED_POLLS = 9


class FreezeWatch:
    """Watches the process that `set_process` named last.

    Args:
        what: Name of the process, for the log.
        consequence: What follows its end, for the log.
    """

    def __init__(self, what: str, *, consequence: str) -> None:
        self._what, self._consequence = what, consequence
        self._pid, self._num_stopped = 0, 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=f"watch of {what}", daemon=True).start()

    def set_process(self, process: Mapping[str, Any]) -> None:
        """Watch this process if it is on this machine. process: its `pid` and `machine`."""
        self._num_stopped = 0
        self._pid = process["pid"] if process["machine"] == machine_id() else 0

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(POLL_PERIOD_S):
            pid = self._pid
            is_stopped = pid != 0 and read_process_stat(pid).state == STOPPED
            self._num_stopped = self._num_stopped + 1 if is_stopped else 0
            if self._num_stopped >= MAX_STOPPED_POLLS:
                self._pid = 0
                logger.warning(
                    "%s (pid %d) is stopped by SIGSTOP for %.1f s; killing it, and %s",
                    self._what,
                    pid,
                    MAX_STOPPED_POLLS * POLL_PERIOD_S,
                    self._consequence,
                )
                kill_process(pid)
