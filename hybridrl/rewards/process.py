"""One score process seen from its parent: start it, send calls, receive results, kill it.

Runs in the driver process. `process_pool` decides which calls it gets; `process_main` is the child's side.
"""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from hybridrl.rewards.function_address import FunctionAddress

PROCESS_MAIN = Path(__file__).with_name("process_main.py")
LOAD_TIMEOUT_S = 120.0  # a reward function may import torch from a cold network disk
EXIT_TIMEOUT_S = 1.0  # an idle process exits within a few milliseconds
MAX_CHUNK = 256  # calls per frame: enough to hide the round trip of the cheapest function


@dataclass(frozen=True)
class CallResult:
    """Result of one call: the function's `value`, or the kind of `failure` and a readable `reason`."""

    value: Any = None
    failure: Literal["timeout", "error"] | None = None
    reason: str = ""


@dataclass(frozen=True)
class LoadFailure:
    """Why the function cannot be used. `kind`: "path", "name", "import", "signature", "timeout" or "died"."""

    kind: str
    reason: str


class ScoreProcess:
    """A child in its own session, so that killing it also kills what the reward function started.

    Attributes:
        pending: Numbers of the calls sent and not answered, the running one first.
        deadline: When the running call, or loading, has taken too long (monotonic seconds).
        chunk_size: How many calls it should get next.
        lost: The connection is closed, or the process failed to load.
    """

    def __init__(self, function: FunctionAddress, *, timeout_s: float):
        self.timeout_s = timeout_s
        self.pending: deque[int] = deque()
        self.loaded = self.busy = self.lost = False
        self.load_failure: LoadFailure | None = None
        self.deadline = time.monotonic() + LOAD_TIMEOUT_S
        self.chunk_size = 1
        self._num_answered = 0
        self._received = bytearray()
        self.socket, remote = socket.socketpair()
        self.socket.settimeout(max(timeout_s, EXIT_TIMEOUT_S))  # sending blocks only on a stopped or dead process
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(PROCESS_MAIN), str(remote.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                start_new_session=True,
            )
        self._send(function.request())

    @property
    def idle(self) -> bool:
        return self.loaded and not self.busy and not self.lost

    def send_calls(self, numbers: list[int], calls: list[bytes]) -> None:
        """Send calls (pickled keyword arguments) with their numbers. The process must be idle."""
        self.busy, self._num_answered = True, 0
        self.pending.extend(numbers)
        self.deadline = time.monotonic() + self.timeout_s
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
        return [answer for frame in self._frames() if (answer := self._handle_frame(frame)) is not None]

    def failed(self, now: float) -> bool:
        """Return whether it is lost, or its running call was overdue at `now` (monotonic seconds)."""
        return self.lost or now >= self.deadline

    def reap(self) -> CallResult:
        """Kill a failed process and all it started; return the result of its running call.

        Sets `load_failure` if it never loaded the function.
        """
        has_died = self.lost or self.process.poll() is not None
        outcome = (
            describe_exit(self.stop(grace_s=0))
            if has_died
            else f"had not loaded the function after {LOAD_TIMEOUT_S:g} s"
        )
        if not self.loaded and self.load_failure is None:
            self.load_failure = LoadFailure("import", f"its process {outcome}")
        if has_died:
            return CallResult(failure="error", reason=f"its process {outcome}")
        self.stop(grace_s=0)
        return CallResult(failure="timeout", reason=f"it was not done after {self.timeout_s:g} s and was killed")

    def stop(self, *, grace_s: float = EXIT_TIMEOUT_S) -> int | None:
        """Stop the process and all it started; return its exit code.

        An idle process gets `grace_s` seconds to exit by itself.
        """
        self.socket.close()
        if self.idle and grace_s:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT_S)
        return self.process.returncode

    def _send(self, payload: bytes) -> None:
        try:
            self.socket.sendall(struct.pack("!I", len(payload)) + payload)
        except TimeoutError:  # the process is stopped; the frame is incomplete, so nothing can follow
            self.deadline = 0.0
        except OSError:
            self.lost = True

    def _frames(self) -> list[bytes]:
        """Return the complete frames received; keep the start of the next one."""
        frames, start = [], 0
        while len(self._received) >= start + 4:
            end = start + 4 + struct.unpack_from("!I", self._received, start)[0]
            if len(self._received) < end:
                break
            frames.append(bytes(self._received[start + 4 : end]))
            start = end
        del self._received[:start]
        return frames

    def _handle_frame(self, frame: bytes) -> tuple[int, CallResult] | None:
        """Process one frame; return a result if it is one."""
        if not self.loaded:
            kind, reason = pickle.loads(frame)
            self.loaded = kind == "ready"
            if not self.loaded:
                self.load_failure, self.lost = LoadFailure(kind, reason), True
        elif frame:
            self._num_answered += 1
            self.deadline = time.monotonic() + self.timeout_s
            return self.pending.popleft(), read_answer(frame)
        if self.loaded and not frame:
            self.busy = False
            self.chunk_size = min(2 * max(self._num_answered, 1), MAX_CHUNK)
        self.deadline = inf
        return None


def read_answer(frame: bytes) -> CallResult:
    """Return the result in a frame. A value that cannot be unpickled here is the call's error."""
    try:
        kind, value = pickle.loads(frame)
    except Exception as error:
        reason = f"its result cannot be unpickled here: {type(error).__name__}: {error}"
        return CallResult(failure="error", reason=reason)
    return CallResult(value=value) if kind == "ok" else CallResult(failure="error", reason=value)


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended, as the rest of a sentence."""
    if exit_code is None:
        return "does not end"
    if exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL (the machine may be out of memory)"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended by itself with exit status {exit_code}"
