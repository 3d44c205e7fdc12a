"""Run stages made of stages (`serial`, `parallel`, `wrap`) and manage the threads of concurrent stages.

`Composition` is a base class of `Task` and runs in the process of the task. First halves run when they are called.
Their second halves go on a stack: that of the task, or that of the composed stage in progress.
"""

import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from hybridrl.framework.context import Context
from hybridrl.framework.events.labels import VoidMiddleware
from hybridrl.framework.events.task_events import TaskEvents
from hybridrl.framework.stage import StageFn, spec_of, with_spec
from hybridrl.framework.stage_halves import (
    Pending,
    SuspendedStage,
    close_on_error,
    close_suspended,
    composed_spec,
    resume_stages,
    start_stage,
    with_lock,
)
from hybridrl.framework.threads import StageThreads, first_failure

logger = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0  # wait for stages that still run in threads after a failure


class Composition(TaskEvents):
    """Base class of `Task` that runs halves of stages, in the calling thread or in others."""

    _threads: StageThreads  # of stages that overlap, or of async mode

    def _init_composition(self) -> None:
        self._pending: Pending = []  # stages of this step that wait for their second half
        self._step_wrappers: list[Callable[[StageFn], StageFn]] = []
        self._lock = threading.RLock()  # held by stages with lock=True
        self._thread_state = threading.local()  # .stack: where second halves go, default self._pending
        self._thread_pools: list[StageThreads] = []
        self._step_error: BaseException | None = None  # of this step, whose other stages may still run

    # -- composed stages

    def serial(self, *fns: StageFn) -> StageFn:
        """Return one stage `serial<a,b>` that runs `fns` in order.

        Its second half runs theirs in reverse order.
        """
        children = _without_void(fns)

        def run_in_order(ctx: Any) -> Generator[None, None, None]:
            with close_on_error([]) as pending:
                for fn in children:
                    self._start_stage(fn, ctx, pending)
                yield
                resume_stages(pending)

        return with_spec(run_in_order, composed_spec("serial", children))

    def sequence(self, *fns: StageFn) -> StageFn:
        """Alias of `serial`, DI-engine's older name."""
        return self.serial(*fns)

    def parallel(self, *fns: StageFn) -> StageFn:
        """Return one stage `parallel<a,b>` that runs `fns` in one thread each.

        The stage ends when all of them have ended. Its second half runs theirs in the same way. The first exception is
        raised at once; `stop` waits for those that still run.
        """
        children = _without_void(fns)
        threads = self._new_threads(max(1, len(children)))

        def run_side_by_side(ctx: Any) -> Generator[None, None, None]:
            pendings = self._wait_all(
                [threads.submit(functools.partial(self._start_in_thread, fn, ctx)) for fn in children]
            )
            with close_on_error([suspended for pending in pendings for suspended in pending]):
                yield
            self._wait_all([threads.submit(functools.partial(resume_stages, pending)) for pending in pendings])

        return with_spec(run_side_by_side, composed_spec("parallel", children))

    def wrap(self, fn: StageFn, lock: Any = False) -> Callable[[Any], Callable[[], None]]:
        """Return `fn` for use inside another stage.

        `back = child(ctx)` runs the first half and `back()` the second. A second half for which `back` was not called
        runs with the others of the step.

        Args:
            fn: The stage to wrap.
            lock: See `Task.use`.
        """
        fn = self._with_lock(fn, lock)

        def child(ctx: Any) -> Callable[[], None]:
            stack = self._stack()
            suspended = self._start_stage(fn, ctx, stack)

            def back() -> None:
                if suspended is not None and suspended in stack:
                    stack.remove(suspended)
                    suspended.run()

            return back

        return with_spec(child, spec_of(fn))

    # -- halves

    def _start_stage(self, fn: StageFn, ctx: Any, stack: Pending) -> SuspendedStage | None:
        """Run `fn` up to its `yield`; children run by `wrap` or `forward` use the same stack."""
        for wrapper in self._step_wrappers:
            fn = with_spec(wrapper(fn), spec_of(fn))
        outer = self._stack()
        if outer is stack:
            suspended = start_stage(fn, ctx)
        else:
            self._thread_state.stack = stack
            try:
                suspended = start_stage(fn, ctx)
            finally:
                self._thread_state.stack = outer
        if suspended is not None:
            stack.append(suspended)
        return suspended

    def _stack(self) -> Pending:
        return getattr(self._thread_state, "stack", self._pending)

    def _start_in_thread(self, fn: StageFn, ctx: Any) -> Pending:
        """Run `_start_stage` on a stack of its own, for a call in another thread."""
        with close_on_error([]) as own:
            self._start_stage(fn, ctx, own)
            return own

    def _with_lock(self, fn: StageFn, lock: Any) -> StageFn:
        if lock is False or lock is None:
            return fn
        return with_spec(with_lock(fn, self._lock if lock is True else lock), spec_of(fn))

    # -- threads

    def _new_threads(self, num_threads: int) -> StageThreads:
        self._thread_pools.append(StageThreads(num_threads))
        return self._thread_pools[-1]

    def _wait_all(self, futures: Sequence[Future]) -> list:
        """Return the results in order; on the first exception cancel the other calls and raise it."""
        error = first_failure(futures)
        if error is not None:
            self._cancel(futures, error)
            raise error
        return [future.result() for future in futures]

    def _cancel(self, futures: Iterable[Future], error: BaseException) -> None:
        self._step_error = error
        self._mailbox.wake()
        for future in futures:
            future.cancel()
            future.add_done_callback(functools.partial(_log_late_failure, because=error))

    def _failed(self) -> bool:
        return self._step_error is not None or super()._failed()

    def _wait_for_unfinished(self, *, stopping: bool) -> None:
        """Wait for stages of a failed step that still run.

        The next step and the exit hooks must not run concurrently with them.
        """
        for pool in self._thread_pools:
            num_running = pool.stop(STOP_TIMEOUT_S) if stopping else pool.wait(STOP_TIMEOUT_S)
            if num_running:
                logger.warning(
                    "%d stages still run in threads %g s after their step failed; no longer waiting for them",
                    num_running,
                    STOP_TIMEOUT_S,
                )
        self._step_error = None


class ForkingExecutor:
    """Runs the stages of one step for an `OverlapPlan`; concurrent stages work on forks of its context."""

    def __init__(self, owner: Composition, stages: tuple[StageFn, ...], ctx: Context) -> None:
        self._owner, self._stages, self._ctx = owner, stages, ctx
        self._forks: dict[int, Context] = {}

    def run_inline(self, index: int) -> Pending:
        return self._owner._start_in_thread(self._stages[index], self._ctx)

    def submit(self, index: int) -> Future:
        fork = self._forks[index] = self._ctx.fork()
        return self._owner._threads.submit(functools.partial(self._owner._start_in_thread, self._stages[index], fork))

    def result(self, index: int, future: Future) -> Pending:
        pending = future.result()
        self._ctx.join(self._forks.pop(index))
        return pending

    def cancel(self, futures: list[Future], error: BaseException) -> None:
        self._owner._cancel(futures, error)


def _without_void(fns: Iterable[StageFn]) -> list[StageFn]:
    return [fn for fn in fns if not isinstance(fn, VoidMiddleware)]


def _log_late_failure(future: Future, because: BaseException) -> None:
    """Clean up after a stage that ended later than another one failed.

    Its second halves are closed, and its exception is added to the first one and logged.
    """
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        close_suspended(future.result(), because)
    elif error is not because:
        because.add_note(f"another stage failed too: {error!r}")
        logger.warning("the step failed with %r; another stage of it failed too: %r", because, error, exc_info=error)
