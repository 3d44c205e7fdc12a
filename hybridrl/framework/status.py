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
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from hybridrl import single_controller
from hybridrl.framework.stage import StageFn, spec_of

logger = logging.getLogger(__name__)
LINE_TIMEOUT_S = 5.0  # for a line that a handler is writing
IDLE_S = 1.0  # without a block, after which the thread ends
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
    now = time.monotonic()
    block = _Block(what, threading.get_ident(), period_s, place_s, started_at=now, due_at=now + first_s)
    single_controller.forget_work()
    _THREAD.add(block)
    try:
        yield
    finally:
        _THREAD.end(block)


@dataclass(eq=False)
class _Block:
    what: str
    caller: int  # its thread
    period_s: float
    place_s: float
    started_at: float
    due_at: float  # of the next line
    has_ended: bool = False

    def line(self) -> str:
        seconds, work = time.monotonic() - self.started_at, single_controller.ask_work()
        done = "" if work is None else f"{work}, "
        place = f"; this process is at {_place_of(self.caller)}" if seconds >= self.place_s else ""
        return f"{self.what}: {done}{seconds:.0f} s so far{place}"


class _StatusThread:
    """Logs for all blocks of this process, in one thread.

    The thread lasts from block to block: in a process without memory, the start of another would wait for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._open: list[_Block] = []
        self._is_running = False

    def add(self, block: _Block) -> None:
        with self._locked() as has_lock:
            if not has_lock:
                return
            self._open.append(block)
            self._changed.notify()
            if not self._is_running:
                threading.Thread(target=self._run, name="status", daemon=True).start()
                self._is_running = True

    def end(self, block: _Block) -> None:
        """End a block. No line of it comes later."""
        block.has_ended = True
        with self._locked():
            pass

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock. False: a handler that does not end has it."""
        has_lock = self._changed.acquire(timeout=LINE_TIMEOUT_S)
        try:
            yield has_lock
        finally:
            if has_lock:
                self._changed.release()

    def _run(self) -> None:
        with self._changed:
            try:
                is_told = True
                while is_told or self._open:
                    is_told = self._changed.wait(self._log_due())
            finally:
                self._is_running = False

    def _log_due(self) -> float:
        """Log the lines that are due; return the seconds until the next one."""
        self._open = [block for block in self._open if not block.has_ended]
        for block in self._open:
            if block.due_at <= time.monotonic():
                logger.info(block.line())
                block.due_at = time.monotonic() + block.period_s
        next_at = min((block.due_at for block in self._open), default=time.monotonic() + IDLE_S)
        return max(next_at - time.monotonic(), 0.0)


_THREAD = _StatusThread()


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
