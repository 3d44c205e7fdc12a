"""One score process seen from its parent: start it, send calls, receive results, kill it.

Runs in the driver process. `process_pool` decides which calls it gets, `reward_calls` is the child's side, and
`system/child_process` has the protocol. A child may return any score.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.reward_limits import RewardLimits
from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.system.child_process import ChildProgram, ProtocolError
from hybridrl.system.process_stat import STOPPED, read_process_stat

CALLS = f"{Path(__file__).with_name('reward_calls.py')}:RewardCalls"
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
    """Why the function cannot be used.

    `kind`: "path", "name", "import", or "signature" for a function that cannot take the arguments.
    """

    kind: str
    reason: str


class ScoreProcess(ChildProgram):
    """A child that loads a reward function and runs its calls. `pending` has their numbers.

    Attributes:
        deadline: When the running call, or loading, has taken too long (monotonic seconds).
        chunk_size: How many calls it should get next.
        was_harmed: Somebody else killed or stopped it (SIGKILL, SIGSTOP), as far as can be seen; set by `reap`.
        load_failure: Why it has not loaded the function.
        lost: The connection is closed, the process failed to load, or it sent a frame that is none.
    """

    def __init__(self, function: FunctionAddress, *, timeout_s: float, limits: RewardLimits):
        self.timeout_s = timeout_s
        self.lost = self.was_harmed = False
        self.load_failure: LoadFailure | None = None
        self.deadline = time.monotonic() + LOAD_TIMEOUT_S
        self.chunk_size = 1
        self._num_answered = 0
        self._call_started = 0.0
        self._violation = ""
        super().__init__(CALLS, limits=limits.of_process(), environment=limits.environment(os.environ))
        self.socket.settimeout(max(timeout_s, EXIT_TIMEOUT_S))  # sending blocks only on a stopped or dead process
        self._send(function.request())

    def send_calls(self, numbers: Sequence[int], calls: Sequence[bytes]) -> None:
        """Send calls (`pickled_call`) with their numbers. The process must be idle."""
        self._num_answered = 0
        self._start_clock()
        self._send(self.frame_of_calls(numbers, calls))

    def receive(self) -> list[tuple[int, CallResult]]:
        """Return the results that have arrived, as (number of the call, result).

        Blocks unless the socket is readable.
        """
        try:
            data = self.socket.recv(1 << 20)
        except OSError:
            data = b""
        self.lost = self.lost or not data
        results = []
        try:
            for kind, value, number in self.answers(data):
                if number is not None:
                    result = CallResult(value) if kind == "ok" else CallResult(failure="error", reason=value[1])
                    results.append((number, result))
                self._note(kind, value)
        except ProtocolError as error:
            self.lost, self._violation = True, str(error)
        return results

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
        has_died = self.lost or self.poll() is not None
        is_stopped = self.pid is not None and read_process_stat(self.pid).state == STOPPED
        exit_code = self.end()
        self.was_harmed = not self._violation and (is_stopped or (has_died and exit_code == -signal.SIGKILL))
        if self._violation:
            outcome = f"was killed: {self._violation}"
        elif has_died:
            outcome = self.describe_exit(exit_code)
        else:
            outcome = f"had not loaded the function after {LOAD_TIMEOUT_S:g} s"
        if not self.loaded and self.load_failure is None:
            self.load_failure = LoadFailure("import", f"its process {outcome}")
        if has_died:
            return CallResult(failure="error", reason=f"its process {outcome}")
        return CallResult(failure="timeout", reason=f"it was not done after {self.timeout_s:g} s and was killed")

    def stop(self) -> None:
        """End the process and all it started. An idle one gets `EXIT_TIMEOUT_S` to exit by itself."""
        self.socket.close()
        if self.idle:
            self.wait(EXIT_TIMEOUT_S)
        self.end()

    def _send(self, frame: bytes) -> None:
        try:
            self.socket.sendall(frame)
        except TimeoutError:  # the process is stopped; the frame is incomplete, so nothing can follow
            self.deadline = 0.0
        except OSError:
            self.lost = True

    def _start_clock(self) -> None:
        """Let the time limit of a call begin now."""
        self._call_started = time.monotonic()
        self.deadline = self._call_started + self.timeout_s

    def _note(self, kind: str, value: Any) -> None:
        """Set deadline and chunk size by an answer."""
        if kind == "importing":
            restarted = min(time.monotonic() + self.timeout_s, self._call_started + LOAD_TIMEOUT_S)
            self.deadline = max(self.deadline, restarted)
        elif kind == "failed":
            self.load_failure, self.lost = LoadFailure(value[0][0], value[1]), True
        elif kind in ("ok", "error"):
            self._num_answered += 1
            self._start_clock()
            if self.idle:
                self.chunk_size = min(2 * self._num_answered, MAX_CHUNK)
        if self.idle:
            self.deadline = inf
