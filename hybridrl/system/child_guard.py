"""The program between a process and a child that it starts: it ends the child with all that the child started.

`ChildProcess` (`child_process`) runs this file as a program of its own. It imports only the standard library.

    python -I -S child_guard.py CONTROL_FD PARENT_PID LIMITS COMMAND...

The guard starts COMMAND and waits until the child has ended, the parent is gone, or the parent writes to the control
pipe. Then it kills every descendant, those in sessions of their own too: the kernel gives it processes whose parent has
ended (PR_SET_CHILD_SUBREAPER). The kernel kills the child if the guard itself is killed (PR_SET_PDEATHSIG). Neither
needs the child's cooperation, so a child that holds its interpreter lock or ignores signals ends, too.

The guard ends as the child did: with the same exit status, or by the same signal. It runs no code of users and is no
sandbox: a child may kill it.
"""

import codecs
import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_PERIOD_MS = 250  # between two looks at the number of processes, and at the parent's process id
KILL_TIMEOUT_S = 5.0  # for killed processes to end; one in an uninterruptible call of the kernel may take longer
REST_TIMEOUT_S = 0.5  # to pass on what a child printed before its end
PIPE_BYTES = 4096  # a pipe that is writable takes as much without blocking
EXIT_NOT_STARTED = 127
EXIT_TOO_MANY_PROCESSES = 125
MIB = 1 << 20
# As in `driver/terminal.py`: what a child prints may be a model's text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def main() -> NoReturn:
    """Start the command of the arguments, wait, and end as it did."""
    control, parent, limits, command = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]
    os.set_inheritable(control, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    outputs = [os.pipe() for _ in range(2)]
    child = os.fork()
    if child == 0:
        run_command(command, limits, outputs=[end for _, end in outputs])
    sources = {source: target for (source, _), target in zip(outputs, (1, 2), strict=True)}
    close_all_but({0, 1, 2, control, *sources})
    guard = Guard(child, sources, control=control, parent=parent, limits=limits)
    guard.wait()
    guard.kill_descendants()
    guard.relay_rest()
    exit_like(guard.status, too_many=guard.too_many)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; elsewhere than on Linux, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def run_command(command: list[str], limits: dict[str, float | None], *, outputs: list[int]) -> NoReturn:
    """Become COMMAND, in a session of its own. Does not return."""
    try:
        guard = os.getppid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it ended before the kernel knew
            os._exit(EXIT_NOT_STARTED)
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and a program inherits that
            signal.signal(ignored, signal.SIG_DFL)
        for end, number in zip(outputs, (1, 2), strict=True):
            os.dup2(end, number)
        limit(resource.RLIMIT_CORE, 0)
        limit(resource.RLIMIT_DATA, limits["memory_mb"])
        limit(resource.RLIMIT_FSIZE, limits["file_mb"])
        # The kernel ends this process before the one that trains.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(EXIT_NOT_STARTED)


def limit(kind: int, megabytes: float | None) -> None:
    """Set a limit of this process; None: leave it as it is."""
    if megabytes is None:
        return
    hard = resource.getrlimit(kind)[1]
    wanted = int(megabytes * MIB)
    bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (bound, bound))


def close_all_but(kept: set[int]) -> None:
    """Close every other descriptor, so that only the child holds those that were meant for it."""
    low = 3
    for number in sorted(kept):
        if number > low:  # an empty range would be taken for one without an end
            os.closerange(low, number)
        low = max(low, number + 1)
    os.closerange(low, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class Guard:
    """State of the wait for one child.

    Attributes:
        status: The child's wait status; None while it runs.
        too_many: The child had more descendants than allowed.
    """

    def __init__(
        self, child: int, sources: dict[int, int], *, control: int, parent: int, limits: dict[str, float | None]
    ):
        self.child, self.sources, self.control, self.parent = child, sources, control, parent
        self.max_processes, output_mb = limits["processes"], limits["output_mb"]
        self.output_mb, self.output_left = output_mb, None if output_mb is None else int(output_mb * MIB)
        self.decoders = {source: codecs.getincrementaldecoder("utf-8")("replace") for source in sources}
        self.status: int | None = None
        self.too_many = self.has_dropped = False
        self.rest_until: float | None = None
        self.exited = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None

    def wait(self) -> None:
        """Return when the child has ended, or the parent is gone or wants it to end."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        for source in self.sources:
            poll.register(source, select.POLLIN)
        if self.exited is not None:
            poll.register(self.exited, select.POLLIN)
        while self.status is None and os.getppid() == self.parent and not self.too_many:
            ready = [descriptor for descriptor, _ in poll.poll(POLL_PERIOD_MS)]
            if self.control in ready:
                return
            for source in self.sources.keys() & set(ready):
                if not self.relay(source):
                    poll.unregister(source)
            self.reap()
            self.too_many = self.max_processes is not None and len(descendants()) > self.max_processes

    def relay(self, source: int) -> bool:
        """Pass on what the child printed, up to its limit; return False at the end."""
        data = os.read(source, PIPE_BYTES)
        if not data:
            return False
        text = self.decoders[source].decode(self.within_limit(data))
        self.write(self.sources[source], CONTROL.sub("\ufffd", text).encode())
        return True

    def within_limit(self, data: bytes) -> bytes:
        """Return the part of the output that may still be passed on, and a notice where it ends."""
        if self.output_left is None or len(data) <= self.output_left:
            self.output_left = None if self.output_left is None else self.output_left - len(data)
            return data
        notice = f"\n[process {self.child}: more than {self.output_mb:g} MB of output, the rest is dropped]\n"
        kept = data[: self.output_left] + (b"" if self.has_dropped else notice.encode())
        self.output_left, self.has_dropped = 0, True
        return kept

    def write(self, target: int, data: bytes) -> None:
        """Write in pieces that never block for long: a reader that does not read must not keep the child alive."""
        poll = select.poll()
        poll.register(target, select.POLLOUT)
        while data:
            if poll.poll(0):
                try:
                    data = data[os.write(target, data[:PIPE_BYTES]) :]
                except OSError:
                    return
            elif self.must_stop_writing():
                return
            else:
                poll.poll(POLL_PERIOD_MS)

    def must_stop_writing(self) -> bool:
        """Return whether the child must end now, or, after its end, whether the rest has had its time."""
        if self.rest_until is not None:
            return time.monotonic() > self.rest_until
        control = select.poll()
        control.register(self.control, select.POLLIN)
        return bool(control.poll(0)) or os.getppid() != self.parent

    def relay_rest(self) -> None:
        """Pass on what was printed before the end."""
        self.rest_until = time.monotonic() + REST_TIMEOUT_S
        poll = select.poll()
        for source in self.sources:
            poll.register(source, select.POLLIN)
        while ready := poll.poll(0):
            for source, _ in ready:
                if not self.relay(source):
                    poll.unregister(source)

    def reap(self) -> None:
        """Collect processes that have ended: the child, and those that the kernel gave to this process."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.child:
                    self.status = ended[1]

    def kill_descendants(self) -> None:
        """Kill everything below this process, again and again until nothing is left."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (pids := descendants()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.002)
        self.reap()


def descendants() -> list[int]:
    """Return the ids of all processes below this one, zombies too."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if not _HAS_CHILDREN_FILES else ():
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        below = children_of(pid) if _HAS_CHILDREN_FILES else children.get(pid, [])
        found += below
        waiting += below
    return found


def children_of(pid: int) -> list[int]:
    """Return a process's children, from the kernel's list of each of its threads."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def exit_like(status: int | None, *, too_many: bool) -> NoReturn:
    """End as the child did."""
    if too_many:
        os._exit(EXIT_TOO_MANY_PROCESSES)
    if status is None or not os.WIFSIGNALED(status):
        os._exit(EXIT_NOT_STARTED if status is None else os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(EXIT_NOT_STARTED)


if __name__ == "__main__":
    main()
