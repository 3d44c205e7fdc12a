"""One score process seen from its parent: start it, send calls, receive results, kill it.

Runs in the driver process. `process_pool` decides which calls it gets; `process_main` is the child's side and has the
protocol. What a child sends is data and is checked, but a child may return any score: the limits are for mistakes, and
for texts that exhaust a function. They are no sandbox for hostile functions.
"""

import json
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.reward_limits import RewardLimits
from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.system.child_process import ChildProcess
from hybridrl.system.process_stat import STOPPED, read_process_stat

PROCESS_MAIN = Path(__file__).with_name("process_main.py")
LOAD_TIMEOUT_S = 120.0  # a reward function may import torch from a cold network disk
EXIT_TIMEOUT_S = 1.0  # an idle process exits within a few milliseconds
MAX_CHUNK = 256  # calls per frame: enough to hide the round trip of the cheapest function
MAX_FRAME_BYTES = 64 << 20  # of an answer


@dataclass(frozen=True)
class CallResult:
    """Result of one call: the function's `value`, or the kind of `failure` and a readable `reason`."""

    value: Any = None
    failure: Literal["timeout", "error"] | None = None
    reason: str = ""


@dataclass(frozen=True)
class LoadFailure:
    """Why the function cannot be used.

    `kind`: "path", "name", "import", "signature", "timeout" or "died".
    """

    kind: str
    reason: str


class ProtocolError(Exception):
    """A frame that the child's program cannot have sent at this point."""


class ScoreProcess:
    """A child that ends with this process, and takes along what the reward function started.

    Attributes:
        pending: Numbers of the calls sent and not answered, the running one first.
        deadline: When the running call, or loading, has taken too long (monotonic seconds).
        chunk_size: How many calls it should get next.
        was_harmed: Somebody else killed or stopped it (SIGKILL, SIGSTOP), as far as can be seen; set by `reap`.
        lost: The connection is closed, the process failed to load, or it sent a frame that is none.
    """

    def __init__(self, function: FunctionAddress, *, timeout_s: float, limits: RewardLimits):
        self.timeout_s = timeout_s
        self.pending: deque[int] = deque()
        self.loaded = self.busy = self.lost = self.was_harmed = False
        self.load_failure: LoadFailure | None = None
        self.deadline = time.monotonic() + LOAD_TIMEOUT_S
        self.chunk_size = 1
        self._num_answered = 0
        self._call_started = 0.0
        self._pid: int | None = None
        self._num_frames = 0
        self._violation = ""
        self._received = bytearray()
        self.socket, remote = socket.socketpair()
        self.socket.settimeout(max(timeout_s, EXIT_TIMEOUT_S))  # sending blocks only on a stopped or dead process
        with remote:
            self.process = ChildProcess(
                [sys.executable, "-P", str(PROCESS_MAIN), str(remote.fileno())],
                limits=limits.of_process(),
                environment=limits.environment(os.environ),
                pass_fds=[remote.fileno()],
            )
        self._send(function.request())

    @property
    def idle(self) -> bool:
        return self.loaded and not self.busy and not self.lost

    def send_calls(self, numbers: list[int], calls: list[bytes]) -> None:
        """Send calls (pickled keyword arguments) with their numbers. The process must be idle."""
        self.busy, self._num_answered = True, 0
        self.pending.extend(numbers)
        self._start_clock()
        self._send(pickle.dumps(calls))

    def receive(self) -> list[tuple[int, CallResult]]:
        """Return the results that have arrived, as (number of the call, result).

        Blocks unless the socket is readable.
        """
        try:
            data = self.socket.recv(1 << 20)
        except OSError:
            data = b""
        self.lost = self.lost or not data
        self._received += data
        answers = []
        try:
            for frame in self._frames():
                if (answer := self._handle_frame(frame)) is not None:
                    answers.append(answer)
        except ProtocolError as error:
            self.lost, self._violation = True, str(error)
        return answers

    def call_seconds(self, now: float) -> float:
        """Return how long its running call has taken at `now` (monotonic seconds)."""
        return now - self._call_started

    def failed(self, now: float) -> bool:
        """Return whether it is lost, or its running call was overdue at `now` (monotonic seconds)."""
        return self.lost or now >= self.deadline

    def reap(self) -> CallResult:
        """Kill a failed process and all it started; return the result of its running call.

        Sets `load_failure` if it never loaded the function.
        """
        has_died = self.lost or self.process.poll() is not None
        is_stopped = self._pid is not None and read_process_stat(self._pid).state == STOPPED
        exit_code = self.stop(grace_s=0)
        self.was_harmed = not self._violation and (is_stopped or (has_died and exit_code == -signal.SIGKILL))
        if self._violation:
            outcome = f"was killed: {self._violation}"
        elif has_died:
            outcome = self.process.describe_exit(exit_code)
        else:
            outcome = f"had not loaded the function after {LOAD_TIMEOUT_S:g} s"
        if not self.loaded and self.load_failure is None:
            self.load_failure = LoadFailure("import", f"its process {outcome}")
        if has_died:
            return CallResult(failure="error", reason=f"its process {outcome}")
        return CallResult(failure="timeout", reason=f"it was not done after {self.timeout_s:g} s and was killed")

    def stop(self, *, grace_s: float = EXIT_TIMEOUT_S) -> int | None:
        """Stop the process and all it started; return its exit code.

        An idle process gets `grace_s` seconds to exit by itself.
        """
        self.socket.close()
        if self.idle and grace_s:
            self.process.wait(grace_s)
        return self.process.end()

    def _send(self, payload: bytes) -> None:
        try:
            self.socket.sendall(struct.pack("!I", len(payload)) + payload)
        except TimeoutError:  # the process is stopped; the frame is incomplete, so nothing can follow
            self.deadline = 0.0
        except OSError:
            self.lost = True

    def _start_clock(self) -> None:
        """Let the time limit of a call begin now."""
        self._call_started = time.monotonic()
        self.deadline = self._call_started + self.timeout_s

    def _frames(self) -> Iterator[bytes]:
        """Yield the complete frames received; keep the start of the next one."""
        start = 0
        try:
            while len(self._received) >= start + 4:
                (size,) = struct.unpack_from("!I", self._received, start)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"it sent an answer of {size >> 20} MB; at most {MAX_FRAME_BYTES >> 20}")
                end = start + 4 + size
                if len(self._received) < end:
                    return
                frame, start = bytes(self._received[start + 4 : end]), end
                yield frame
        finally:
            del self._received[:start]

    def _handle_frame(self, frame: bytes) -> tuple[int, CallResult] | None:
        """Process one frame; return a result if it is one. Raises ProtocolError."""
        pid, number, kind, value = read_frame(frame)
        if self._pid is None and kind == "started":
            self._pid = pid
        if (pid, number) != (self._pid, self._num_frames):
            raise ProtocolError("something else than its program sent an answer (a process that it started?)")
        self._num_frames += 1
        if not self.loaded:
            if kind != "started":
                self._set_loaded(kind, value)
        elif kind in ("ok", "error") and self.pending:
            self._num_answered += 1
            self._start_clock()
            return self.pending.popleft(), as_result(kind, value)
        elif kind == "importing" and self.pending:
            restarted = min(time.monotonic() + self.timeout_s, self._call_started + LOAD_TIMEOUT_S)
            self.deadline = max(self.deadline, restarted)
        elif kind == "idle" and self.busy:
            self.busy, self.deadline = False, inf
            self.chunk_size = min(2 * max(self._num_answered, 1), MAX_CHUNK)
        else:
            raise ProtocolError("it sent an answer that nobody asked for")
        return None

    def _set_loaded(self, kind: str, reason: Any) -> None:
        self.loaded, self.deadline = kind == "ready", inf
        if not self.loaded:
            self.load_failure, self.lost = LoadFailure(kind, str(reason)), True


def read_frame(frame: bytes) -> tuple[int, int, str, Any]:
    """Return process id, number, kind and value of a frame.

    Raises ProtocolError if it is none.
    """
    try:
        pid, number, kind, value = json.loads(frame)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"it sent something that is no answer ({type(error).__name__})") from error
    if not isinstance(kind, str):
        raise ProtocolError("it sent something that is no answer")
    return pid, number, kind, value


def as_result(kind: str, value: Any) -> CallResult:
    """Return the result of a call from the kind and the value of its frame."""
    return CallResult(value=value) if kind == "ok" else CallResult(failure="error", reason=str(value))
