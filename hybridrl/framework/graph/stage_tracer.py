"""Record when the stages of a run run, for its timeline (`timeline.py`).

task.use_wrapper(StageTracer(first_step=1))     # in the driver, during the run
"""

import contextlib
import functools
from collections.abc import Generator
from types import GeneratorType
from typing import Any

from hybridrl.framework.stage import StageFn, StageSpec, spec_of
from hybridrl.single_controller.monitoring.tracing import span

TRACE = "trace"  # directory of the spans in a run's directory: TRACE/{job}/{process}.jsonl
DRIVER = "driver"  # name of the driver's file and of its group of rows


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
                if (
                    isinstance(result, GeneratorType) and next(result, self) is self
                ):  # exhausted, or suspended before its second half
                    result = None
            return self._second_half(spec, ctx, result) if isinstance(result, GeneratorType) else result

        return traced

    def _second_half(self, spec: StageSpec, ctx: Any, halves: Generator) -> Generator[None, None, None]:
        with contextlib.closing(halves):
            ended = False
            while not ended:
                yield
                with self._span(spec, ctx):
                    ended = next(halves, self) is self

    def _span(self, spec: StageSpec, ctx: Any) -> contextlib.AbstractContextManager[None]:
        return span("stage", spec.name, step=ctx.total_step + self.first_step, of=spec.role or DRIVER)
