"""Seconds per stage: a wrapper for `Task.use_wrapper`.

Runs in the process of the task. It is not a profiler: it measures whole stages only.
"""

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator
from statistics import fmean
from types import GeneratorType
from typing import Any

from hybridrl.framework.stage import StageFn, spec_of

logger = logging.getLogger(__name__)


class StepTimer:
    """Measures both halves of every stage, in seconds.

    Args:
        print_per_step: If > 0, every so many steps the log gets one line per stage.
        smooth_window: The logged mean covers the latest `print_per_step * smooth_window` runs.

    Attributes:
        last: Stage name -> time of its last complete run.
        records: Stage name -> times of its latest runs.

    `ctx.timing[name]` is the time of this step so far, summed over all stages of that name.
    """

    def __init__(self, print_per_step: int = -1, smooth_window: int = 10) -> None:
        self.print_per_step = print_per_step
        self.window = smooth_window * max(1, print_per_step)
        self.records: dict[str, deque[float]] = {}
        self.last: dict[str, float] = {}
        self._lock = threading.Lock()  # stages of the same name may run concurrently

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn` with time measurement."""
        name = spec_of(fn).name

        @functools.wraps(fn)
        def timed(ctx: Any) -> Any:
            start = time.perf_counter()
            try:
                result = fn(ctx)
            finally:
                elapsed = self._add(ctx, name, start)
            if isinstance(result, GeneratorType):
                return self._timed_halves(ctx, name, result, elapsed)
            self._record(ctx, name, elapsed)
            return result

        return timed

    def _timed_halves(self, ctx: Any, name: str, halves: Generator, total: float) -> Generator[None, None, None]:
        with contextlib.closing(halves):
            while True:
                start = time.perf_counter()
                try:
                    next(halves)
                except StopIteration:
                    break
                finally:
                    total += self._add(ctx, name, start)
                yield
        self._record(ctx, name, total)

    def _add(self, ctx: Any, name: str, start: float) -> float:
        elapsed = time.perf_counter() - start
        timing = ctx.setdefault("timing", {})
        with self._lock:
            timing[name] = timing.get(name, 0.0) + elapsed
        return elapsed

    def _record(self, ctx: Any, name: str, seconds: float) -> None:
        self.last[name] = seconds
        with self._lock:
            record = self.records.get(name)
            if record is None:
                record = self.records[name] = deque(maxlen=self.window)
            record.append(seconds)
        if self.print_per_step > 0 and ctx.total_step % self.print_per_step == 0:
            logger.info(
                "stage %s took %.1f ms, mean of the last %d runs %.1f ms",
                name,
                seconds * 1e3,
                len(record),
                fmean(record) * 1e3,
            )
