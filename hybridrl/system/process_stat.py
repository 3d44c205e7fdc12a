"""Kernel state of a process of this machine: there, stopped, and CPU used."""

import os
from typing import NamedTuple

STOPPED = "T"  # by SIGSTOP or SIGTSTP; a process under a debugger is in state t


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
