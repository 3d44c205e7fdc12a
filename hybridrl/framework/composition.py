"""Stages made of stages: in order, side by side, or inside a stage of your own. And threads, for those that run at the
same time.

First halves run here and leave their second halves on a stack: the task's, or that of the composed stage in progress.
"""

import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from hybridrl.framework.parallel.labels import VoidMiddleware
from hybridrl.framework.parallel.task_events import TaskEvents
from hybridrl.framework.stage import StageFn, spec_of, with_spec
from hybridrl.framework.stage_halves import (
    Half,
    Pending,
    close,
    closing,
    locked,
    named_after,
    run_first_half,
    run_second_halves,
)
from hybridrl.framework.threads import StageThreads, first_failure

logger = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0  # for stages that still run in threads when the task stops


class Composition(TaskEvents):
    """The part of a task that runs halves of stages, in this thread or in others."""

    def _begin_composition(self) -> None:
        self._pending: Pending = []  # stages of this step whose second half is still to run
        self._step_wrappers: list[Callable[[StageFn], StageFn]] = []
        self._lock = threading.RLock()  # of the stages with lock=True
        self._here = threading.local()  # .stack: where second halves go in this thread, if not to self._pending
        self._pools: list[StageThreads] = []
        self._error: BaseException | None = None  # of this step, while other stages of it may still be running

    # -- stages made of stages

    def serial(self, *fns: StageFn) -> StageFn:
        """Return one stage `serial<a,b>` that runs `fns` in order and, when its turn comes back, their second halves in
        reverse.
        """
        children = _without_void(fns)

        def run_in_order(ctx: Any) -> Generator[None, None, None]:
            with closing([]) as pending:
                for fn in children:
                    self._first_half(fn, ctx, pending)
                yield
                run_second_halves(pending)

        return with_spec(run_in_order, named_after("serial", children))

    def sequence(self, *fns: StageFn) -> StageFn:
        """`serial`, under its older name."""
        return self.serial(*fns)

    def parallel(self, *fns: StageFn) -> StageFn:
        """Return one stage `parallel<a,b>` that runs `fns` in a thread each and goes on when all have ended; so with
        second halves.

        The first exception is raised at once; those who still run then are waited for when the task stops.
        """
        children = _without_void(fns)
        threads = self._new_threads(max(1, len(children)))

        def run_side_by_side(ctx: Any) -> Generator[None, None, None]:
            pendings = self._gather(
                [threads.submit(functools.partial(self._first_half_apart, fn, ctx)) for fn in children]
            )
            with closing([half for pending in pendings for half in pending]):
                yield
            self._gather([threads.submit(functools.partial(run_second_halves, pending)) for pending in pendings])

        return with_spec(run_side_by_side, named_after("parallel", children))

    def wrap(self, fn: StageFn, lock: Any = False) -> Callable[[Any], Callable[[], None]]:
        """Return `fn` for use inside another stage: `back = child(ctx)` runs its first half, `back()` its second.

        A second half that `back` did not run is run with the others of the step. lock: see `use`.
        """
        fn = self._with_lock(fn, lock)

        def child(ctx: Any) -> Callable[[], None]:
            stack = self._stack()
            half = self._first_half(fn, ctx, stack)

            def back() -> None:
                if half is not None and half in stack:
                    stack.remove(half)
                    half.run()

            return back

        return with_spec(child, spec_of(fn))

    # -- halves

    def _first_half(self, fn: StageFn, ctx: Any, stack: Pending) -> Half | None:
        """Run `fn` up to its `yield`.

        Children that it runs by `wrap` or `forward` leave their second halves on the same stack.
        """
        for wrapper in self._step_wrappers:
            fn = with_spec(wrapper(fn), spec_of(fn))
        outer = self._stack()
        self._here.stack = stack
        try:
            half = run_first_half(fn, ctx)
        finally:
            self._here.stack = outer
        if half is not None:
            stack.append(half)
        return half

    def _stack(self) -> Pending:
        return getattr(self._here, "stack", self._pending)

    def _first_half_apart(self, fn: StageFn, ctx: Any) -> Pending:
        """`_first_half` for another thread: what waits comes back, to be put where it belongs in the order of the
        stages.
        """
        with closing([]) as own:
            self._first_half(fn, ctx, own)
            return own

    def _with_lock(self, fn: StageFn, lock: Any) -> StageFn:
        if lock is False or lock is None:
            return fn
        return with_spec(locked(fn, self._lock if lock is True else lock), spec_of(fn))

    # -- threads

    def _new_threads(self, num_threads: int) -> StageThreads:
        self._pools.append(StageThreads(num_threads))
        return self._pools[-1]

    def _gather(self, futures: Sequence[Future]) -> list:
        """Return the results, in order.

        The first exception is raised at once, and nothing more of these calls is begun.
        """
        error = first_failure(futures)
        if error is not None:
            self._give_up(futures, error)
            raise error
        return [future.result() for future in futures]

    def _give_up(self, futures: Iterable[Future], error: BaseException) -> None:
        self._error = error
        self._mailbox.wake()
        for future in futures:
            future.cancel()
            future.add_done_callback(functools.partial(_note_late, because=error))

    def _failed(self) -> bool:
        return self._error is not None or super()._failed()

    def _wait_for_late(self, *, stopping: bool) -> None:
        """Wait for stages of a failed step that still run: a step must not begin beside them, nor exit hooks."""
        for pool in self._pools:
            late = pool.stop(STOP_TIMEOUT_S) if stopping else pool.wait(STOP_TIMEOUT_S)
            if late:
                logger.warning(
                    "%d stages were still running in threads %g s after the step had failed", late, STOP_TIMEOUT_S
                )
        self._error = None


def _without_void(fns: Iterable[StageFn]) -> list[StageFn]:
    return [fn for fn in fns if not isinstance(fn, VoidMiddleware)]


def _note_late(future: Future, because: BaseException) -> None:
    """What a stage that ran beside a failed one came to: its second half is closed, its exception is told with the
    first.
    """
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        close(future.result(), because)
    elif error is not because:
        because.add_note(f"another stage failed too: {error!r}")
        logger.warning("another stage failed too, after %r: %r", because, error, exc_info=error)
