"""Lines about what a run is doing while it takes long: a stage of a step, or the loading of models.

The trainers use it in the driver. A thread logs while the caller works or waits; it touches nothing of the run.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Generator, Iterator
from types import GeneratorType
from typing import Any

from hybridrl import single_controller
from hybridrl.framework.stage import StageFn, spec_of

logger = logging.getLogger(__name__)
JOIN_S = 5.0  # for a line that a handler is writing
FIRST_S, PERIOD_S = 20.0, 60.0  # until the first line, and between later ones


@contextlib.contextmanager
def reporting(what: str, *, first_s: float = FIRST_S, period_s: float = PERIOD_S) -> Iterator[None]:
    """Log a line now and then for the duration of the block.

    For instance "step 3, gen (64 rows): 1,310 of 3,072 tokens, 80 s so far".
    """
    ended, start = threading.Event(), time.monotonic()
    single_controller.forget_work()

    def report() -> None:
        wait_s = first_s
        while not ended.wait(wait_s):
            work = single_controller.ask_work()
            done = "" if work is None else f"{work}, "
            logger.info("%s: %s%.0f s so far", what, done, time.monotonic() - start)
            wait_s = period_s

    thread = threading.Thread(target=report, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=JOIN_S)


def report_long_stages(fn: StageFn, *, first_s: float = FIRST_S, period_s: float = PERIOD_S) -> StageFn:
    """Return a stage that says so now and then while it takes long; a wrapper for `Task.use_wrapper`."""
    name = spec_of(fn).name

    def status(ctx: Any) -> contextlib.AbstractContextManager[None]:
        batch = ctx.get("batch")
        rows = "" if batch is None else f" ({len(batch)} rows)"
        return reporting(f"step {ctx.step_number}, {name}{rows}", first_s=first_s, period_s=period_s)

    @functools.wraps(fn)
    def reported(ctx: Any) -> Any:
        with status(ctx):
            result = fn(ctx)
        return halves(ctx, result) if isinstance(result, GeneratorType) else result

    def halves(ctx: Any, submitted: Generator) -> Generator[Any, None, Any]:
        while True:
            with status(ctx):
                try:
                    call = next(submitted)
                except StopIteration as end:
                    return end.value
            yield call

    return reported
