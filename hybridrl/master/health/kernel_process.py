"""What the kernel says about processes of this machine: how one ended, whether it is stopped, whether it works."""

import fcntl
import os
import signal
import struct
from typing import NamedTuple

from hybridrl.single_controller.monitoring.heartbeat_client import oom_kills

# `ioctl(pidfd, PIDFD_GET_INFO)` tells how a process ended to whoever held its pidfd (Linux 6.15); struct pidfd_info has
# 64 bytes or more.
PIDFD_GET_INFO, PIDFD_INFO_EXIT, INFO_BYTES, EXIT_CODE_AT = 0xC040FF0B, 1 << 3, 64, 60
STOPPED = "T"  # by SIGSTOP or SIGTSTP; a process under a debugger is in state t


class Condition(NamedTuple):
    """state: the letter of /proc, "" for a process that is gone. cpu_s: seconds of CPU it has used."""

    state: str
    cpu_s: float


def condition(process_id: int) -> Condition:
    """Return what a process does, as the kernel sees it."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return Condition("", 0.0)
    ticks = int(fields[11]) + int(fields[12])
    return Condition("" if fields[0] in "ZX" else fields[0], ticks / os.sysconf("SC_CLK_TCK"))


class ProcessWatch:
    """A process that is looked at until it is dead, and then once more for how it ended."""

    def __init__(self, process_id: int) -> None:
        self.process_id, self._oom_kills = process_id, oom_kills()
        try:
            self._pidfd: int | None = os.pidfd_open(process_id)
        except OSError:  # gone already
            self._pidfd = None

    @property
    def is_dead(self) -> bool:
        return condition(self.process_id).state == ""

    def account(self) -> str | None:
        """Return how it ended, in words; None where the kernel does not tell, or not yet."""
        if self._pidfd is None:
            return None
        info = bytearray(INFO_BYTES)
        struct.pack_into("Q", info, 0, PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self._pidfd, PIDFD_GET_INFO, info)
        except OSError:
            return None
        if not struct.unpack_from("Q", info, 0)[0] & PIDFD_INFO_EXIT:
            return None
        return in_words(struct.unpack_from("i", info, EXIT_CODE_AT)[0], out_of_memory=oom_kills() > self._oom_kills)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def in_words(status: int, *, out_of_memory: bool = False) -> str:
    """Return what a wait status says.

    out_of_memory: the kernel ended some process of the machine for want of memory meanwhile.
    """
    if not os.WIFSIGNALED(status):
        return f"it ended by itself with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and out_of_memory:
        return "killed by the kernel because the machine ran out of memory (OOM)"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
