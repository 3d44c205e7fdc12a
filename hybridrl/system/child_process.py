"""`ChildProcess`: the one way to start a program that ends with its parent and takes along what it started.

Between parent and child runs a guard (`child_guard`), a small program without code of users. Whoever starts a child
from any thread may end: the child ends with the process, not with the thread. Forks that are drivers themselves
(`driver/supervisor.py`) are not started here, because they must not load anything again.

`ChildProgram` is a child that runs foreign code: a reward function, or an environment. What it sends is data and is
checked. Its limits are for mistakes, and for texts that exhaust foreign code. They are no sandbox for hostile code.
"""

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GUARD = Path(__file__).with_name("child_guard.py")
PROGRAM = Path(__file__).with_name("child_program.py")
MAX_FRAME_BYTES = 64 << 20  # of an answer, as in `child_program`
KINDS = ("started",), ("ready", "failed"), ("ok", "error", "importing")  # of the first frame, the second, and the rest
EXIT_TOO_MANY_PROCESSES = 125  # of the guard, as in `child_guard`
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


class ProtocolError(Exception):
    """A frame that the child's program cannot have sent at this point."""


class ChildProgram(ChildProcess):
    """A child that runs `child_program`, and the parent's half of the protocol.

    Sends and receives nothing itself: rewards wait in a selector, environments on an event loop.

    Args:
        calls: What the calls are: `path/to/file.py:Name`, as `child_program` reads it.
        python: Its interpreter; None: that of this process.
        limits: What the child may use.
        environment: The variables that it sees.

    Attributes:
        socket: The connection.
        pid: Its process id, once it has started.
        loaded: The object is there.
        idle: It has answered what it was sent, as far as it will, and waits for calls.
        pending: The caller's names of the calls sent and not answered, the running one first.
    """

    def __init__(self, calls: str, *, python: str | None = None, limits: ProcessLimits, environment: Mapping[str, str]):
        self.pid: int | None = None
        self.loaded = self.idle = False
        self.pending: deque[Any] = deque()
        self._num_frames, self._received = 0, bytearray()
        self.socket, remote = socket.socketpair()
        with remote:
            super().__init__(
                [python or sys.executable, "-P", str(PROGRAM), str(remote.fileno()), calls],
                limits=limits,
                environment=environment,
                pass_fds=[remote.fileno()],
            )

    def frame_of_calls(self, names: Sequence[Any], calls: Sequence[bytes]) -> bytes:
        """Return the frame that sends calls, as `pickled_call` has them, and expect their answers."""
        self.idle = False
        self.pending.extend(names)
        return _frame(pickle.dumps(list(calls)))

    def answers(self, data: bytes) -> Iterator[tuple[str, Any, Any]]:
        """Yield kind, value and name of the call of each answer that `data` completes.

        Kinds and values are those of `child_program`. Answers that belong to no call have the name None.

        Raises:
            ProtocolError: The frame is none that the program sends now. The child is of no more use.
        """
        self._received += data
        while len(self._received) >= 4:
            (size,) = struct.unpack_from("!I", self._received)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"it sent an answer of {size >> 20} MB; at most {MAX_FRAME_BYTES >> 20}")
            if len(self._received) < 4 + size:
                return
            frame = self._received[4 : 4 + size]
            del self._received[: 4 + size]
            kind, value = self._read(frame)
            yield kind, value, self.pending.popleft() if kind in ("ok", "error") else None

    def _read(self, frame: bytearray) -> tuple[str, Any]:
        """Return kind and value of a frame that the program sends at this point. Raises ProtocolError."""
        try:
            pid, number, kind, value, is_idle = json.loads(frame)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"it sent something that is no answer ({type(error).__name__})") from error
        if self.pid is None and kind == "started":
            self.pid = pid
        if (pid, number) != (self.pid, self._num_frames):
            raise ProtocolError("something else than its program sent an answer (a process that it started?)")
        expected = KINDS[min(self._num_frames, 2)] if self._num_frames < 2 or self.pending else ()
        if kind not in expected or (kind in ("failed", "error") and not _is_described(value)):
            raise ProtocolError("it sent an answer that nobody asked for")
        self._num_frames += 1
        self.loaded, self.idle = self.loaded or kind == "ready", is_idle is True and kind != "importing"
        return kind, value

    def end(self) -> int | None:
        self.socket.close()
        return super().end()


def frame_of_request(
    *, path: str | None, name: str, pickled: bytes | None = None, arguments: bytes, sys_path: Sequence[str] | None
) -> bytes:
    """Return the first frame for a child: the object to load, by import path or pickled (`child_program.load_object`).

    Args:
        path: Python file or dotted module; None for a pickled object.
        name: Of the object.
        pickled: The object.
        arguments: Pickled keyword arguments for the class of the calls.
        sys_path: Python path of the child; None: its own.
    """
    if path is not None and (path.endswith(".py") or "/" in path):
        path = os.path.abspath(os.path.expanduser(path))
    request = {"path": path, "name": name, "pickled": pickled, "arguments": arguments, "sys_path": sys_path}
    return _frame(pickle.dumps(request))


def pickled_call(method: str, /, **arguments: Any) -> bytes:
    """Return a call for `frame_of_calls`: a method and its arguments. Raises what pickling raises."""
    return pickle.dumps((method, arguments), protocol=pickle.HIGHEST_PROTOCOL)


def _frame(payload: bytes) -> bytes:
    return struct.pack("!I", len(payload)) + payload


def _is_described(value: Any) -> bool:
    """Return whether a value is a list of texts and a text, as a failure has them."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], list) or not value[0]:
        return False
    return all(isinstance(text, str) for text in (*value[0], value[1]))


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
