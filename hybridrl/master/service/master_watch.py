"""`MasterWatch`: kills a master that is stopped by SIGSTOP, so that Ray restarts it.

Nobody else would notice: connections of a stopped process stay open, and a report never waits for its acknowledgement.
Runs in the driver, a thread in the process of `MasterClient`. It watches only a master on its own machine.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from hybridrl.master.health.kernel_process import STOPPED, read_process_stat
from hybridrl.single_controller.processes.termination import kill_process
from hybridrl.system.machine import machine_id

logger = logging.getLogger(__name__)
POLL_PERIOD_S = 0.5
# 4.5 s, as for the processes that the master watches. Ctrl-Z stops the driver, too, which then counts nothing.
MAX_STOPPED_POLLS = 9


class MasterWatch:
    """Watches the master that `set_process` named last."""

    def __init__(self) -> None:
        self._pid, self._num_stopped = 0, 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="master watch", daemon=True).start()

    def set_process(self, process: Mapping[str, Any]) -> None:
        """Watch this master. process: its `pid` and `machine`."""
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
                    "the master (pid %d) is stopped by SIGSTOP for %.1f s; killing it, and Ray restarts it",
                    pid,
                    MAX_STOPPED_POLLS * POLL_PERIOD_S,
                )
                kill_process(pid)
