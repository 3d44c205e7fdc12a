"""Killable processes that run a reward function with a wall-clock limit for every call.

A call that takes too long, raises, or takes its process down gives a failed result with a reason; it never raises here
and costs no other call its result. Async functions work; within one process calls run one after the other, so
`num_processes` is how many overlap.

Not here: what is called with what and what a result means (`manager`), and the child's side (`score_child`, which no
parent imports).
"""

import os
import pickle
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.rewards.function_address import ScoreFunction
from hybridrl.rewards.process import CallResult, LoadFailure, ScoreProcess


class ScoreProcesses:
    """A pool of `num_processes` children that load `function` and answer calls; each call may take `timeout_s` seconds.

    Children start at the first use and end with `close()`, with this object or with this process, also when it is
    killed. Loading the function does not count against the limit; what it imports during its first call does. Can be
    pickled: the copy starts its own children.
    """

    def __init__(self, function: ScoreFunction, *, num_processes: int = 1, timeout_s: float = 10.0):
        if num_processes < 1 or timeout_s <= 0:
            raise ValueError(f"num_processes={num_processes} must be at least 1 and timeout_s={timeout_s} above 0")
        self.function, self.num_processes, self.timeout_s = function, num_processes, timeout_s
        self._processes: list[ScoreProcess] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        weakref.finalize(self, end_all, self._processes, owner=os.getpid())

    def check(self) -> LoadFailure | None:
        """Start the processes, wait until one has loaded the function, and return None; or why the function cannot be
        used.
        """
        with self._lock:
            self._start_missing()
            while self._processes and not any(process.loaded for process in self._processes):
                failure = self._exchange(Job([]))
            return None if self._processes else failure

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[CallResult]:
        """Return the result of the function for each set of keyword arguments, in their order.

        Waits for the slowest; with every call failing at its limit that is len(calls) * timeout_s / num_processes.
        """
        job = Job(calls)
        with self._lock:
            self._start_missing()
            while job.unfinished:
                self._hand_out(job)
                failure = self._exchange(job)
                if not self._processes:
                    job.fail_waiting(f"no reward process could be started: {failure.reason}")
        return job.results

    def close(self) -> None:
        """End the children: idle ones by themselves, others are killed. The next call starts new ones."""
        with self._lock:
            for process in self._processes:
                self._selector.unregister(process.socket)
            end_all(self._processes, owner=os.getpid())

    def __reduce__(self):
        settings = {"num_processes": self.num_processes, "timeout_s": self.timeout_s}
        return restore, (self.function, settings)

    def _start_missing(self) -> None:
        while len(self._processes) < self.num_processes:
            process = ScoreProcess(self.function, timeout_s=self.timeout_s)
            self._selector.register(process.socket, selectors.EVENT_READ, process)
            self._processes.append(process)

    def _hand_out(self, job: "Job") -> None:
        """Give every idle process its next calls; towards the end smaller pieces, so that all finish together."""
        share = -(-len(job.waiting) // (2 * self.num_processes))
        for process in self._processes:
            if process.idle and job.waiting:
                numbers = [job.waiting.popleft() for _ in range(min(process.chunk_size, share, len(job.waiting)))]
                process.give(numbers, [job.calls[number] for number in numbers])

    def _exchange(self, job: "Job") -> LoadFailure | None:
        """Wait for answers or the next deadline; replace processes in trouble. Returns why a process could not load the
        function.

        A process that cannot load is not replaced before the next batch: its successor would do no better.
        """
        now = (
            time.monotonic()
        )  # before reading: an answer that lies here unread because this process had to wait is in time
        wait_s = min(process.deadline for process in self._processes) - now
        lost = any(process.lost for process in self._processes)
        for key, _ in self._selector.select(0 if lost else max(wait_s, 0)):
            process = key.data
            for number, result in process.receive():
                job.finish(number, result)
            if process.idle and process.pending:
                job.give_back(process.pending)
        failures = [self._replace(process, job) for process in self._processes[:] if process.failed(now)]
        return next(filter(None, failures), None)

    def _replace(self, process: ScoreProcess, job: "Job") -> LoadFailure | None:
        """Book the running call as failed, give the others back, and start a new process if this one had loaded the
        function.
        """
        self._selector.unregister(process.socket)
        self._processes.remove(process)
        trouble = process.bury()
        if process.pending:
            job.finish(process.pending.popleft(), trouble)
            job.give_back(process.pending)
        if process.load_failure is None:
            self._start_missing()
        return process.load_failure


class Job:
    """The calls of one batch: `waiting` are the numbers of those to hand out, `results` fills up in any order."""

    def __init__(self, calls: Sequence[Mapping[str, Any]]):
        self.results: list[CallResult | None] = [None] * len(calls)
        self.calls: list[bytes] = [b""] * len(calls)
        self.waiting: deque[int] = deque()
        self.unfinished = len(calls)
        for number, call in enumerate(calls):
            try:
                self.calls[number] = pickle.dumps(dict(call), protocol=pickle.HIGHEST_PROTOCOL)
                self.waiting.append(number)
            except Exception as error:
                self.finish(
                    number,
                    CallResult(
                        failure="error", reason=f"its arguments cannot be sent: {type(error).__name__}: {error}"
                    ),
                )

    def finish(self, number: int, result: CallResult) -> None:
        """Book the result of a call, once."""
        self.results[number] = result
        self.unfinished -= 1

    def give_back(self, numbers: deque[int]) -> None:
        """Put calls that were handed out but not run at the head of the queue, in order; empties `numbers`."""
        self.waiting.extendleft(reversed(numbers))
        numbers.clear()

    def fail_waiting(self, reason: str) -> None:
        """Book every call that is not handed out as failed."""
        while self.waiting:
            self.finish(self.waiting.popleft(), CallResult(failure="error", reason=reason))


def restore(function: ScoreFunction, settings: dict[str, Any]) -> ScoreProcesses:
    """Return the pool that was pickled, with no children yet."""
    return ScoreProcesses(function, **settings)


def end_all(processes: list[ScoreProcess], *, owner: int) -> None:
    """End processes and forget them; a forked copy of their owner (another pid) leaves them alone."""
    if os.getpid() == owner:
        for process in processes:
            process.end()
    processes.clear()
