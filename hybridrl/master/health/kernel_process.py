"""State and end of a process of this machine, as the kernel reports them.

The master calls this in its own process, or as a Ray task on the node of a process of another machine.
"""

import fcntl
import os
import signal
import struct

from hybridrl.single_controller.monitoring.heartbeat_client import oom_kills
from hybridrl.system.process_stat import read_process_stat

# `ioctl(pidfd, PIDFD_GET_INFO)` returns the exit status to a process that holds the pidfd (Linux 6.15 and later).
# struct pidfd_info has 64 bytes or more.
PIDFD_GET_INFO, PIDFD_INFO_EXIT, INFO_BYTES, EXIT_CODE_OFFSET = 0xC040FF0B, 1 << 3, 64, 60


class PidfdWatch:
    """Holds the pidfd of a process, to read its exit status after its death."""

    def __init__(self, process_id: int) -> None:
        self.process_id, self._oom_kills = process_id, oom_kills()
        try:
            self._pidfd: int | None = os.pidfd_open(process_id)
        except OSError:  # gone already
            self._pidfd = None

    @property
    def is_dead(self) -> bool:
        return read_process_stat(self.process_id).state == ""

    def exit_reason(self) -> str | None:
        """Return how the process ended, or None if the kernel does not report it (yet)."""
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
        status = struct.unpack_from("i", info, EXIT_CODE_OFFSET)[0]
        return describe_exit_status(status, out_of_memory=oom_kills() > self._oom_kills)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def describe_exit_status(status: int, *, out_of_memory: bool = False) -> str:
    """Return a wait status as text.

    Args:
        status: As `os.waitpid` returns it.
        out_of_memory: Whether the kernel killed a process of this machine for lack of memory meanwhile.
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
