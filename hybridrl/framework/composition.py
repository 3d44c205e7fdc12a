"""Stages made of stages (`serial`, `parallel`, `wrap`), and the threads of concurrent stages.

`Composition` is a part of a task, loaded when it is first used. It runs in the process of the task.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from types import GeneratorType
from typing import Any

from hybridrl.framework.stage import StageFn, StageSpec, VoidMiddleware, spec_of, with_spec
from hybridrl.framework.step_runner import RETURNED, Pending, close_on_error, close_suspended, resume_stages
from hybridrl.framework.threads import StageThreads, first_failure

logger = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0  # wait for stages that still run in threads after a failure


class Composition:
    """Composes stages, and runs halves of stages in threads."""

    def __init__(self, task: Any) -> None:
        self._task, self._runner = task, task.runner
        self.lock = threading.RLock()  # held by stages with lock=True
        self._thread_pools: list[StageThreads] = []
        self._threads = self._new_threads(task.n_async_workers)  # of async mode
        self._submitted: list[Future] = []  # halves that run in them

    # -- composed stages

    def serial(self, *fns: StageFn) -> StageFn:
        """Return one stage `serial<a,b>` that runs `fns` in order.

        Its second half runs theirs in reverse order.
        """
        children = _without_void(fns)

        def run_in_order(ctx: Any) -> Generator[None, None, None]:
            with close_on_error([]) as pending:
                for fn in children:
                    self._runner.start(fn, ctx, pending)
                yield
                resume_stages(pending)

        return with_spec(run_in_order, composed_spec("serial", children))

    sequence = serial  # DI-engine's older name

    def parallel(self, *fns: StageFn) -> StageFn:
        """Return one stage `parallel<a,b>` that runs `fns` in one thread each.

        The stage ends when all of them have ended. Its second half runs theirs in the same way. The first exception is
        raised at once; `stop` waits for those that still run.
        """
        children = _without_void(fns)
        threads = self._new_threads(max(1, len(children)))

        def run_side_by_side(ctx: Any) -> Generator[None, None, None]:
            pendings = self._wait_all([threads.submit(functools.partial(self._start, fn, ctx)) for fn in children])
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
        fn = self.with_lock(fn, lock)

        def child(ctx: Any) -> Callable[[], None]:
            stack = self._runner.stack()
            suspended = self._runner.start(fn, ctx, stack)

            def back() -> None:
                if suspended is not None and suspended in stack:
                    stack.remove(suspended)
                    suspended.run()

            return back

        return with_spec(child, spec_of(fn))

    def with_lock(self, fn: StageFn, lock: Any) -> StageFn:
        """Return `fn`, each half of which runs while it holds a lock; see `Task.use`."""
        if lock is False or lock is None:
            return fn
        return with_spec(_with_lock(fn, self.lock if lock is True else lock), spec_of(fn))

    # -- threads

    def start_in_thread(self, fn: StageFn, ctx: Any) -> None:
        """Start the first half of a stage in a thread; `sync` waits for it."""
        self._submitted.append(self._threads.submit(functools.partial(self._start, fn, ctx)))

    def resume_in_threads(self, pending: Pending) -> None:
        """Start the second halves in threads, last stage first, when all first halves have ended."""
        self.sync()
        while pending:
            self._submitted.append(self._threads.submit(functools.partial(resume_stages, [pending.pop()])))

    def sync(self) -> None:
        """Wait for all halves that were started in threads; raise the first exception at once."""
        submitted, self._submitted = self._submitted, []
        for pending in self._wait_all(submitted) if submitted else ():
            self._runner.pending += pending

    def wait_for_unfinished(self, *, stopping: bool) -> None:
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
        self._runner.error = None

    def _start(self, fn: StageFn, ctx: Any) -> Pending:
        """Run a first half on a stack of its own, in a thread."""
        with close_on_error([]) as own:
            self._runner.start(fn, ctx, own)
            return own

    def _new_threads(self, num_threads: int) -> StageThreads:
        self._thread_pools.append(StageThreads(num_threads))
        return self._thread_pools[-1]

    def _wait_all(self, futures: Sequence[Future]) -> list:
        """Return the results in order; on the first exception cancel the other calls and raise it."""
        error = first_failure(futures)
        if error is None:
            return [future.result() for future in futures]
        self._runner.error = error
        if events := self._task.loaded("events"):
            events.mailbox.wake()
        for future in futures:
            future.cancel()
            future.add_done_callback(functools.partial(_log_late_failure, because=error))
        raise error


def composed_spec(kind: str, fns: Iterable[StageFn]) -> StageSpec:
    """Return the spec of several stages that are used as one."""
    return StageSpec(f"{kind}<{','.join(spec_of(fn).name for fn in fns)}>")


def _without_void(fns: Iterable[StageFn]) -> list[StageFn]:
    return [fn for fn in fns if not isinstance(fn, VoidMiddleware)]


def _with_lock(fn: StageFn, lock: Any) -> StageFn:
    @functools.wraps(fn)
    def locked(ctx: Any) -> Any:
        with lock:
            result = fn(ctx)
        return _lock_each_half(result, lock) if isinstance(result, GeneratorType) else result

    return locked


def _lock_each_half(halves: Generator, lock: Any) -> Generator[None, None, None]:
    with contextlib.closing(halves):
        while True:
            with lock:
                if next(halves, RETURNED) is RETURNED:
                    return
            yield


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
