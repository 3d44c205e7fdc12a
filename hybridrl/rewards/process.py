"""One score process seen from its parent: started, given calls, listened to, killed.

Which calls it gets is `processes`' matter.
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

from hybridrl.rewards.function_address import ScoreFunction

CHILD = Path(__file__).with_name("process_main.py")
LOAD_TIMEOUT_S = 120.0  # a reward function may import torch from a cold network disk
END_TIMEOUT_S = 1.0  # an idle process needs a few milliseconds
MAX_CHUNK = 256  # calls in one frame: enough to hide the round trip of the cheapest function


@dataclass(frozen=True)
class CallResult:
    """What came of one call: the function's `value`, or the kind of `failure` and a `reason` that a person can read."""

    value: Any = None
    failure: Literal["timeout", "error"] | None = None
    reason: str = ""


@dataclass(frozen=True)
class LoadFailure:
    """Why the function cannot be used. `kind`: "path", "name", "import", "signature", "timeout" or "died"."""

    kind: str
    reason: str


class ScoreProcess:
    """A child in a session of its own, so that killing it also kills what the reward function started.

    `pending` holds the numbers of the calls it was given and has not answered, the running one first. `deadline`
    (monotonic seconds) is when the running call, or loading, has taken too long. `chunk_size` is how many calls it
    should get next.
    """

    def __init__(self, function: ScoreFunction, *, timeout_s: float):
        self.timeout_s = timeout_s
        self.pending: deque[int] = deque()
        self.loaded = self.busy = self.lost = False
        self.load_failure: LoadFailure | None = None
        self.deadline = time.monotonic() + LOAD_TIMEOUT_S
        self.chunk_size = 1
        self._answered = 0
        self._inbox = bytearray()
        self.socket, remote = socket.socketpair()
        self.socket.settimeout(
            max(timeout_s, END_TIMEOUT_S)
        )  # of sending: it waits only for a process that is stopped or dead
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(remote.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                start_new_session=True,
            )
        self._send(function.request())

    @property
    def idle(self) -> bool:
        return self.loaded and not self.busy and not self.lost

    def give(self, numbers: list[int], calls: list[bytes]) -> None:
        """Hand over calls (pickled keyword arguments), known by their numbers. The process must be idle."""
        self.busy, self._answered = True, 0
        self.pending.extend(numbers)
        self.deadline = time.monotonic() + self.timeout_s
        self._send(pickle.dumps(calls))

    def receive(self) -> list[tuple[int, CallResult]]:
        """Return the answers that have arrived, as (number of the call, result).

        Waits unless the socket is readable.
        """
        try:
            data = self.socket.recv(1 << 20)
        except OSError:
            data = b""
        self.lost = self.lost or not data
        self._inbox += data
        return [answer for frame in self._frames() if (answer := self._take(frame)) is not None]

    def failed(self, now: float) -> bool:
        """Return whether it is lost, or its running call was overdue at `now` (monotonic seconds)."""
        return self.lost or now >= self.deadline

    def bury(self) -> CallResult:
        """Kill a failed process and all it started; return what its running call came to.

        Sets `load_failure` if it never loaded.
        """
        died = self.lost or self.process.poll() is not None
        fate = describe_exit(self.end(grace_s=0)) if died else f"had not loaded the function after {LOAD_TIMEOUT_S:g} s"
        if not self.loaded and self.load_failure is None:
            self.load_failure = LoadFailure("import", f"its process {fate}")
        if died:
            return CallResult(failure="error", reason=f"its process {fate}")
        self.end(grace_s=0)
        return CallResult(failure="timeout", reason=f"it was not done after {self.timeout_s:g} s and was killed")

    def end(self, *, grace_s: float = END_TIMEOUT_S) -> int | None:
        """End the process and all it started; return its exit code.

        An idle one gets `grace_s` seconds to end by itself.
        """
        self.socket.close()
        if self.idle and grace_s:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        return self.process.returncode

    def _send(self, payload: bytes) -> None:
        try:
            self.socket.sendall(struct.pack("!I", len(payload)) + payload)
        except TimeoutError:  # it is stopped; the frame is cut short, so nothing can follow
            self.deadline = 0.0
        except OSError:
            self.lost = True

    def _frames(self) -> list[bytes]:
        """Return the complete frames received, and keep the beginning of the next."""
        frames, start = [], 0
        while len(self._inbox) >= start + 4:
            end = start + 4 + struct.unpack_from("!I", self._inbox, start)[0]
            if len(self._inbox) < end:
                break
            frames.append(bytes(self._inbox[start + 4 : end]))
            start = end
        del self._inbox[:start]
        return frames

    def _take(self, frame: bytes) -> tuple[int, CallResult] | None:
        """Act on one frame; return an answer if it is one."""
        if not self.loaded:
            kind, reason = pickle.loads(frame)
            self.loaded = kind == "ready"
            if not self.loaded:
                self.load_failure, self.lost = LoadFailure(kind, reason), True
        elif frame:
            self._answered += 1
            self.deadline = time.monotonic() + self.timeout_s
            return self.pending.popleft(), read_answer(frame)
        if self.loaded and not frame:
            self.busy = False
            self.chunk_size = min(2 * max(self._answered, 1), MAX_CHUNK)
        self.deadline = inf
        return None


def read_answer(frame: bytes) -> CallResult:
    """Return the result in a frame; a value whose class is not known here is the call's error."""
    try:
        kind, value = pickle.loads(frame)
    except Exception as error:
        return CallResult(failure="error", reason=f"returned what cannot be read here: {type(error).__name__}: {error}")
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
