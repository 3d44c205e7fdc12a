"""Lines about what a run is doing while it takes long: a stage of a step, or the loading of models.

The trainers use it in the driver. A thread logs while the caller works or waits; it touches nothing of the run.
"""

import contextlib
import functools
import logging
import os
import sys
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
PLACE_S = 300.0  # from then on a line says where the caller is, as the master does for workers
STDLIB = os.path.dirname(threading.__file__) + os.sep


@contextlib.contextmanager
def reporting(
    what: str, *, first_s: float = FIRST_S, period_s: float = PERIOD_S, place_s: float = PLACE_S
) -> Iterator[None]:
    """Log a line now and then for the duration of the block.

    For instance "step 3, gen (64 rows): 1,310 of 3,072 tokens, 80 s so far".
    """
    ended, start, caller = threading.Event(), time.monotonic(), threading.get_ident()
    single_controller.forget_work()

    def report() -> None:
        wait_s = first_s
        while not ended.wait(wait_s):
            seconds, work = time.monotonic() - start, single_controller.ask_work()
            done = "" if work is None else f"{work}, "
            place = f"; this process is at {_place_of(caller)}" if seconds >= place_s else ""
            logger.info("%s: %s%.0f s so far%s", what, done, seconds, place)
            wait_s = period_s

    thread = threading.Thread(target=report, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=JOIN_S)


def _place_of(thread: int) -> str:
    """Return the innermost line of a thread outside Python's standard library, `file:line in function`."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_back is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return "its end" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_standard(path: str) -> bool:
    return path.startswith("<") or (path.startswith(STDLIB) and "site-packages" not in path)


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
