"""Killable processes that run a reward function with a wall-clock limit for every call.

A call that takes too long, raises, or kills its process gives a failed result with a reason. It never raises here and
never fails another call. Async functions work. Each process runs its calls one after the other, so at most
`num_processes` calls overlap.

Used by `manager`, in the driver process. Not here: which calls are made and what a result means (`manager`), and the
child's side (`reward_calls`).
"""

import functools
import logging
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.config.reward_limits import RewardLimits
from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.rewards.process import CallResult, LoadFailure, ScoreProcess
from hybridrl.system.child_process import pickled_call

logger = logging.getLogger(__name__)
REPORT_AFTER_S = 20.0  # two default time limits: a batch that is only slow is done by then


class ScoreProcessPool:
    """A pool of `num_processes` children that load `function` and run calls of at most `timeout_s` seconds.

    Children start at the first use. They end with `close()`, with this object, or with this process, also when it is
    killed. Loading the function does not count against the limit, nor do imports within a call: each one lets the
    call's time begin again, for `process.LOAD_TIMEOUT_S` seconds at most. A pickled copy starts its own children.
    """

    def __init__(
        self,
        function: FunctionAddress,
        *,
        num_processes: int = 1,
        timeout_s: float = 10.0,
        limits: RewardLimits | None = None,
    ):
        if num_processes < 1 or timeout_s <= 0:
            raise ValueError(f"num_processes={num_processes} must be at least 1 and timeout_s={timeout_s} above 0")
        self.function, self.num_processes, self.timeout_s = function, num_processes, timeout_s
        self.limits = (limits or RewardLimits()).resolved(num_processes)
        self._processes: list[ScoreProcess] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        weakref.finalize(self, stop_all, self._processes, owner=os.getpid())

    def check(self) -> LoadFailure | None:
        """Start the processes and wait until one has loaded the function; return why none can, or None."""
        with self._lock:
            self._start_missing()
            job = ScoreJob([])
            while self._processes and not any(process.loaded for process in self._processes):
                failure = self._poll(job)
            return None if self._processes else failure

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[CallResult]:
        """Return the result of the function for each set of keyword arguments, in order.

        Waits for the slowest call. If every call times out, that is len(calls) * timeout_s / num_processes seconds. A
        wait of `REPORT_AFTER_S` is logged with the calls that run, and again after pauses that double.
        """
        job = ScoreJob(calls)
        with self._lock:
            self._start_missing()
            while len(job.results) < len(calls):
                self._assign_calls(job)
                failure = self._poll(job)
                if not self._processes:
                    assert failure is not None, "only a process that cannot load the function is not replaced"
                    for number in job.waiting:
                        job.fail(number, f"no reward process could be started: {failure.reason}")
        return [job.results[number] for number in range(len(calls))]

    def close(self) -> None:
        """End the children: idle ones exit by themselves, others are killed.

        The next call starts new ones.
        """
        with self._lock:
            for process in self._processes:
                self._selector.unregister(process.socket)
            stop_all(self._processes, owner=os.getpid())

    def __reduce__(self):
        settings: dict[str, Any] = {"num_processes": self.num_processes, "timeout_s": self.timeout_s}
        return functools.partial(ScoreProcessPool, self.function, limits=self.limits, **settings), ()

    def _start_missing(self) -> None:
        while len(self._processes) < self.num_processes:
            process = ScoreProcess(self.function, timeout_s=self.timeout_s, limits=self.limits)
            self._selector.register(process.socket, selectors.EVENT_READ, process)
            self._processes.append(process)

    def _assign_calls(self, job: "ScoreJob") -> None:
        """Send every idle process its next calls; smaller chunks towards the end, so that all finish together."""
        share = -(-len(job.waiting) // (2 * self.num_processes))
        for process in self._processes:
            if process.idle and not process.lost and job.waiting:
                numbers = [job.waiting.popleft() for _ in range(min(process.chunk_size, share, len(job.waiting)))]
                process.send_calls(numbers, [job.pickled[number] for number in numbers])

    def _poll(self, job: "ScoreJob") -> LoadFailure | None:
        """Wait for results or the next deadline, and replace failed processes.

        A process that cannot load the function is not replaced before the next batch: its successor would fail, too.

        Returns:
            Why a process could not load the function, or None.
        """
        now = time.monotonic()  # before reading: a result that this process has not read yet is in time
        if now >= job.next_report:
            job.report(self._processes, now=now)
        wait_s = min(job.next_report, *(process.deadline for process in self._processes)) - now
        lost = any(process.lost for process in self._processes)
        for key, _ in self._selector.select(0 if lost else max(wait_s, 0)):
            process = key.data
            job.results.update(process.receive())
            if process.idle and not process.lost:
                job.requeue(process.pending)
        failures = [self._replace(process, job) for process in self._processes[:] if process.failed(now)]
        return next(filter(None, failures), None)

    def _replace(self, process: ScoreProcess, job: "ScoreJob") -> LoadFailure | None:
        """Record the running call as failed and requeue the others.

        Starts a new process if this one had loaded.

        A call whose process was killed or stopped by somebody else runs once more: the sample is not to blame.
        """
        self._selector.unregister(process.socket)
        self._processes.remove(process)
        result_of_running = process.reap()
        if process.pending and not (process.was_harmed and job.can_repeat(process.pending[0])):
            job.results[process.pending.popleft()] = result_of_running
        job.requeue(process.pending)
        if process.load_failure is None:
            self._start_missing()
        return process.load_failure


class ScoreJob:
    """The calls of one batch.

    Attributes:
        calls: Arguments of each call.
        pickled: Each call as it is sent.
        waiting: Numbers of the calls that are not sent yet.
        results: Each call's result by its number.
        next_report: When the log says what the batch waits for (monotonic seconds).
    """

    def __init__(self, calls: Sequence[Mapping[str, Any]]):
        self.calls = calls
        self.started = time.monotonic()
        self.next_report = self.started + REPORT_AFTER_S
        self.results: dict[int, CallResult] = {}
        self.pickled: dict[int, bytes] = {}
        self._repeated: set[int] = set()
        for number, call in enumerate(calls):
            try:
                self.pickled[number] = pickled_call("score", **call)
            except Exception as error:
                self.fail(number, f"its arguments cannot be sent: {type(error).__name__}: {error}")
        self.waiting = deque(self.pickled)

    def fail(self, number: int, reason: str) -> None:
        """Record the result of a call that is not made."""
        self.results[number] = CallResult(failure="error", reason=reason)

    def can_repeat(self, number: int) -> bool:
        """Return whether a call may run a second time, and count that it does."""
        if number in self._repeated:
            return False
        self._repeated.add(number)
        return True

    def requeue(self, numbers: deque[int]) -> None:
        """Put calls that were sent but not run at the front of the queue.

        They keep their order. Empties `numbers`.
        """
        self.waiting.extendleft(reversed(numbers))
        numbers.clear()

    def report(self, processes: Sequence[ScoreProcess], *, now: float) -> None:
        """Log what the batch waits for, and double the pause before the next report. now: monotonic seconds."""
        running = [
            f"{self._name(process.pending[0])} for {process.call_seconds(now):.0f} s"
            for process in processes
            if process.loaded and process.pending
        ]
        loading = f"{sum(not process.loaded for process in processes)} of {len(processes)} processes load it"
        timeouts = sum(result.failure == "timeout" for result in self.results.values())
        logger.warning(
            "the reward function has taken %.0f s: %d of %d samples are done%s; %s",
            now - self.started,
            len(self.results),
            len(self.calls),
            f", {timeouts} of them stopped at reward_model.timeout_s" if timeouts else "",
            f"running: {', '.join(running)}" if running else loading,
        )
        self.next_report = now + (now - self.started)

    def _name(self, number: int) -> str:
        """Return how the log names a call: by row, data source and index in the data."""
        call, info = self.calls[number], self.calls[number].get("extra_info")
        index = info.get("index") if isinstance(info, Mapping) else None
        known = {"data_source": call.get("data_source"), "index": index}
        named = ", ".join(f"{name}={value!r:.60}" for name, value in known.items() if value is not None)
        return f"sample {number}" + (f" ({named})" if named else "")


def stop_all(processes: list[ScoreProcess], *, owner: int) -> None:
    """Stop processes and clear the list.

    A forked copy of the owner (another pid) leaves the processes alone.
    """
    if os.getpid() == owner:
        for process in processes:
            process.stop()
    processes.clear()
