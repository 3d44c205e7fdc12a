"""Kernel state of processes of this machine: there, stopped by SIGSTOP, stopped for too long, and CPU used.

A stopped process keeps its connections, so nobody who waits for it notices. Who watches processes of its machine kills
one that is stopped for `FREEZE_TIMEOUT_S`, and its loss is then one like any other. The master watches by heartbeats
instead (`master/health/monitor.py`), because its workers may be on other machines.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

logger = logging.getLogger(__name__)
STOPPED = "T"  # by SIGSTOP or SIGTSTP; a process under a debugger is in state t
FREEZE_TIMEOUT_S = 4.5  # the master's, too: with a heartbeat every second, one lost beat is no freeze
MAX_GAP_S = 1.0  # between two checks; a longer one means that the process that checks was stopped itself
WATCH_PERIOD_S = 0.5


class ProcessStat(NamedTuple):
    """Kernel state of a process.

    Attributes:
        state: The state letter of /proc. "" if the process is gone.
        cpu_s: Seconds of CPU that it has used.
    """

    state: str
    cpu_s: float


def read_process_stat(process_id: int) -> ProcessStat:
    """Return the kernel state of a process of this machine."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessStat("", 0.0)
    ticks = int(fields[11]) + int(fields[12])
    return ProcessStat("" if fields[0] in "ZX" else fields[0], ticks / os.sysconf("SC_CLK_TCK"))


class StopClock:
    """Counts how long processes are stopped.

    Ctrl-Z stops the process that counts, too, which then counts nothing.

    Args:
        timeout_s: Seconds after which a stopped process is frozen.
    """

    def __init__(self, timeout_s: float = FREEZE_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._stopped_s: dict[int, float] = {}
        self._checked_at = time.monotonic()

    def check(self, process_ids: Iterable[int]) -> list[int]:
        """Return those processes that are frozen. Call it more often than every `MAX_GAP_S`."""
        now = time.monotonic()
        passed_s, self._checked_at = min(now - self._checked_at, MAX_GAP_S), now
        stopped = [pid for pid in process_ids if read_process_stat(pid).state == STOPPED]
        before = self._stopped_s
        self._stopped_s = {pid: before[pid] + passed_s if pid in before else 0.0 for pid in stopped}
        return [pid for pid, stopped_s in self._stopped_s.items() if stopped_s >= self.timeout_s]

    def describe(self, name: str, process_id: int) -> str:
        """Return the log's words for a frozen process."""
        return f"{name} (pid {process_id}) has been stopped (SIGSTOP) for {self.timeout_s:g} s; killing it"


class FreezeWatch:
    """Kills a process when it is frozen. Waits in a thread of its own.

    Args:
        what: Name of the process, for the log.
        find: Returns the id of the process, 0 if it is not on this machine. Asked again whenever it has ended.
        consequence: What follows its end, for the log.
        kill: Kills a process by its id.
        timeout_s: See `StopClock`.
    """

    def __init__(
        self,
        what: str,
        *,
        find: Callable[[], int],
        consequence: str,
        kill: Callable[[int], None],
        timeout_s: float = FREEZE_TIMEOUT_S,
    ) -> None:
        self._what, self._find, self._consequence, self._kill = what, find, consequence, kill
        self._clock, self._killed = StopClock(timeout_s), 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=f"watch of {what}", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        pid = 0
        while not self._ended.wait(WATCH_PERIOD_S):
            if not pid or not read_process_stat(pid).state:
                pid = self._find()
            for frozen in self._clock.check([pid] if pid not in (0, self._killed) else []):
                self._killed = frozen
                logger.warning("%s, and %s", self._clock.describe(self._what, frozen), self._consequence)
                self._kill(frozen)
