"""Stage wrappers under DI-engine's import path: `StepTimer`, the seconds per stage, for `Task.use_wrapper`.

Runs in the process of the task. It is not a profiler: it measures whole stages only.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator
from statistics import fmean
from types import GeneratorType
from typing import Any, Protocol, runtime_checkable

from hybridrl.framework.stage import StageFn, spec_of

logger = logging.getLogger(__name__)


@runtime_checkable
class TimedWork(Protocol):
    """What a stage with `submits=True` may yield, so that its seconds count while other stages run.

    Attributes:
        begin: When the work began elsewhere, `time.perf_counter()`.
        end: When it had ended.
    """

    begin: float
    end: float


class StepTimer:
    """Measures both halves of every stage, in seconds.

    The time between the halves counts if the stage yields a `TimedWork`, for as long as its work was in progress.

    Args:
        print_per_step: Every so many steps one line per stage is logged, and shown on stderr if logging is not set
            up; 0 for none.
        smooth_window: The logged mean covers the latest `print_per_step * smooth_window` runs.

    Attributes:
        last: Stage name -> time of its last complete run.
        records: Stage name -> times of its latest runs.

    `ctx.timing[name]` is the time of this step so far, summed over all stages of that name.
    """

    def __init__(self, print_per_step: int = 1, smooth_window: int = 10) -> None:
        self.print_per_step = print_per_step
        self.window = smooth_window * max(1, print_per_step)
        self.records: dict[str, deque[float]] = {}
        self.last: dict[str, float] = {}
        self._lock = threading.Lock()  # stages of the same name may run concurrently

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn` with time measurement."""
        name, clock = spec_of(fn).name, time.perf_counter

        @functools.wraps(fn)
        def timed(ctx: Any) -> Any:
            start = clock()
            try:
                result = fn(ctx)
            except BaseException:
                self._add(ctx, name, clock() - start)
                raise
            if isinstance(result, GeneratorType):
                return self._timed_halves(ctx, name, result)
            elapsed = clock() - start
            self._add(ctx, name, elapsed, run=elapsed)
            return result

        return timed

    def _timed_halves(self, ctx: Any, name: str, halves: Generator) -> Generator[Any, None, None]:
        clock, total, submitted = time.perf_counter, 0.0, None
        start = clock()
        try:
            for submitted in halves:
                elapsed = clock() - start
                total += elapsed
                self._add(ctx, name, elapsed)
                yield submitted
                start = clock()
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # which comes at the yield, between two halves
                self._add(ctx, name, clock() - start)
            halves.close()
            raise
        elapsed = clock() - start
        if submitted is not None and isinstance(submitted, TimedWork):
            elapsed += min(start, submitted.end) - submitted.begin  # while this thread did something else
        self._add(ctx, name, elapsed, run=total + elapsed)

    def _add(self, ctx: Any, name: str, elapsed: float, run: float | None = None) -> None:
        """Add the time of a half to the step's, and record a complete run of `run` seconds."""
        timing = ctx.timing if "timing" in ctx.__dict__ else ctx.setdefault("timing", {})
        with self._lock:
            timing[name] = timing.get(name, 0.0) + elapsed
            if run is None:
                return
            self.last[name] = run
            record = self.records.get(name)
            if record is None:
                record = self.records[name] = deque(maxlen=self.window)
            record.append(run)
        if self.print_per_step > 0 and ctx.total_step % self.print_per_step == 0:
            self._print(name, run, record)

    def _print(self, name: str, seconds: float, record: deque[float]) -> None:
        if not logger.isEnabledFor(logging.INFO) and logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)  # who asks for lines sees them, without any setting of logging
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
        logger.info(
            "stage %s took %.1f ms, mean of the last %d runs %.1f ms",
            name,
            seconds * 1e3,
            len(record),
            fmean(tuple(record)) * 1e3,
        )
