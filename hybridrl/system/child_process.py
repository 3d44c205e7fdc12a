"""`ChildProcess`: the one way to start a program that ends with its parent and takes along what it started.

Between parent and child runs a guard (`child_guard`), a small program without code of users. Whoever starts a child
from any thread may end: the child ends with the process, not with the thread. Forks that are drivers themselves
(`driver/supervisor.py`) are not started here, because they must not load anything again.
"""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.system.child_guard import EXIT_TOO_MANY_PROCESSES

GUARD = Path(__file__).with_name("child_guard.py")
MARKER = "HYBRIDRL_CHILD"  # in the environment of everything that one child started
END_TIMEOUT_S = 2.0  # for a guard to kill what it guards; then this process does it


@dataclass(frozen=True)
class ProcessLimits:
    """What a child may use; None: as much as its parent.

    Attributes:
        memory_mb: Data of each process (RLIMIT_DATA). An allocation beyond it fails in the child.
        file_mb: Size of each file that it writes.
        processes: Processes at the same time, the child included. With more of them all are killed.
        output_mb: Standard output and error together. What is more is dropped, which the output says once.
    """

    memory_mb: float | None = None
    file_mb: float | None = None
    processes: int | None = None
    output_mb: float | None = None


class ChildProcess:
    """A running program and its guard.

    Args:
        command: Program and arguments. Standard input is empty; output goes to that of the calling process.
        limits: What the child may use.
        environment: Default: that of the calling process.
        pass_fds: Descriptors that the child inherits.

    Raises:
        OSError: The guard cannot be started. A program that cannot be started exits with status 127.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: ProcessLimits | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ):
        self.limits = limits or ProcessLimits()
        self._marker = uuid.uuid4().hex
        self._control: int | None
        control, self._control = os.pipe()
        arguments = [str(control), str(os.getpid()), json.dumps(asdict(self.limits)), *command]
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *arguments],
                stdin=subprocess.DEVNULL,
                env={**(os.environ if environment is None else environment), MARKER: self._marker},
                pass_fds=[control, *pass_fds],
                start_new_session=True,
            )
        finally:
            os.close(control)

    def poll(self) -> int | None:
        """Return the exit code if the child has ended: negative for a signal; else None."""
        return self._guard.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the child to end by itself and return its exit code; None if it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return self._guard.returncode

    def end(self) -> int | None:
        """Kill the child and all that it started, at once; return its exit code.

        Safe to call again.
        """
        if self._control is not None:
            with suppress(OSError):  # the guard has ended
                os.write(self._control, b".")  # a fork of this process may hold the pipe open, so closing is not enough
            os.close(self._control)
            self._control = None
        if self.wait(END_TIMEOUT_S) is None:
            with suppress(ProcessLookupError):
                os.kill(self._guard.pid, signal.SIGKILL)
            self.wait(END_TIMEOUT_S)
        kill_marked(self._marker)
        return self._guard.returncode

    def describe_exit(self, exit_code: int | None) -> str:
        """Return how the child ended, as the rest of a sentence."""
        if exit_code is None:
            return "does not end"
        if exit_code == EXIT_TOO_MANY_PROCESSES and self.limits.processes is not None:
            return f"was killed with more than {self.limits.processes} processes"
        if exit_code == -signal.SIGKILL:
            return "was killed by SIGKILL (the machine may be out of memory)"
        if exit_code < 0:
            return f"was killed by {signal.Signals(-exit_code).name}"
        return f"ended by itself with exit status {exit_code}"


def kill_marked(marker: str) -> None:
    """Kill the processes of a child whose guard was killed: those with its mark in their environment."""
    entry = f"{MARKER}={marker}".encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    is_marked = entry in file.read().split(b"\0")
                if is_marked:
                    os.kill(int(name), signal.SIGKILL)
