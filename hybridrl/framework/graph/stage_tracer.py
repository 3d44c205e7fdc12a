"""Record when the stages of a run run, for its timeline (`timeline.py`).

task.use_wrapper(StageTracer(first_step=1))     # in the driver, during the run
"""

import contextlib
import functools
import time
from collections.abc import Generator
from types import GeneratorType
from typing import Any

from hybridrl.framework.stage import StageFn, StageSpec, spec_of
from hybridrl.framework.wrapper import TimedWork
from hybridrl.single_controller.monitoring.tracing import DRIVER, record_span, span

SUBMITTED = "submitted"  # row of the driver for work that ran while its main thread did something else


class StageTracer:
    """Wrapper that records both halves of every stage with the number of the step.

    Args:
        first_step: Number of the step that the context counts as 0.
    """

    def __init__(self, *, first_step: int = 1) -> None:
        self.first_step = first_step

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn` with recording."""
        spec = spec_of(fn)

        @functools.wraps(fn)
        def traced(ctx: Any) -> Any:
            with self._span(spec, ctx):
                result = fn(ctx)
                if not isinstance(result, GeneratorType):
                    return result
                first = next(result, self)
            return self._second_half(spec, ctx, result, first)

        return traced

    def _second_half(self, spec: StageSpec, ctx: Any, halves: Generator, first: Any) -> Generator[Any, None, None]:
        with contextlib.closing(halves):
            submitted = first
            while submitted is not self:
                yield submitted
                resumed = time.perf_counter()
                with self._span(spec, ctx):
                    following = next(halves, self)
                if isinstance(submitted, TimedWork) and (end := min(resumed, submitted.end)) > submitted.begin:
                    record_span("stage", spec.name, submitted.begin, end, thread=SUBMITTED, **self._facts(spec, ctx))
                submitted = following

    def _span(self, spec: StageSpec, ctx: Any) -> contextlib.AbstractContextManager[None]:
        return span("stage", spec.name, **self._facts(spec, ctx))

    def _facts(self, spec: StageSpec, ctx: Any) -> dict[str, Any]:
        return {"step": ctx.total_step + self.first_step, "of": spec.role or DRIVER}
