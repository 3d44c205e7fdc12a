"""Run one stage in two halves: before its `yield`, and after it.

`composition.py` and `task.py` call this in the process of the task. On a failure, the exception gets a note that names
the stage, and suspended generators are closed. This module does not decide in which order stages run.
"""

import contextlib
import functools
import threading
from collections.abc import Generator, Iterable, Iterator
from types import GeneratorType
from typing import Any

from hybridrl.framework.stage import StageFn, StageSpec, spec_of

RETURNED = object()  # returned by `next` for an exhausted generator


class SuspendedStage:
    """A stage that has run its first half and waits with its second."""

    __slots__ = ("ctx", "fn", "generator")  # made once per stage and step

    def __init__(self, fn: StageFn, generator: Generator, ctx: Any) -> None:
        self.fn, self.generator, self.ctx = fn, generator, ctx

    @property
    def spec(self) -> StageSpec:
        """The declaration of the stage."""
        return spec_of(self.fn)

    def run(self) -> None:
        """Run the second half to its end.

        Raises:
            RuntimeError: The stage yields a second time.
        """
        try:
            if next(self.generator, RETURNED) is not RETURNED:
                self.generator.close()
                raise RuntimeError("a stage may yield once; code after a second yield would never run")
        except BaseException as error:
            add_stage_note(error, self.spec, self.ctx)
            raise


Pending = list[SuspendedStage]  # in the order in which the first halves ran


def start_stage(fn: StageFn, ctx: Any) -> SuspendedStage | None:
    """Run `fn` up to its `yield` and return the suspended stage.

    None means that there is no `yield`, or that it was not reached.
    """
    try:
        result = fn(ctx)
        if not isinstance(result, GeneratorType) or next(result, RETURNED) is RETURNED:
            return None
    except BaseException as error:
        add_stage_note(error, spec_of(fn), ctx)
        raise
    return SuspendedStage(fn, result, ctx)


def add_stage_note(error: BaseException, spec: StageSpec, ctx: Any) -> None:
    """Add a note with stage and step to an exception."""
    error.add_note(f"in stage {spec.name!r} of step {ctx.step_number}")


def close_suspended(pending: Pending, because: BaseException) -> None:
    """Close generators that will not be resumed, so that their `finally` blocks run."""
    while pending:
        suspended = pending.pop()
        try:
            suspended.generator.close()
        except Exception as failure:
            because.add_note(f"closing stage {suspended.spec.name!r} failed too: {failure!r}")


@contextlib.contextmanager
def close_on_error(pending: Pending) -> Iterator[Pending]:
    """Close the suspended stages if the block raises."""
    try:
        yield pending
    except BaseException as error:
        close_suspended(pending, error)
        raise


def resume_stages(pending: Pending) -> Pending:
    """Run the second halves, last stage first, and return the list, which is then empty.

    If one raises, the others are closed.
    """
    try:
        while pending:
            pending.pop().run()
    except BaseException as error:
        close_suspended(pending, error)
        raise
    return pending


def run_once(fns: Iterable[StageFn], ctx: Any) -> None:
    """Run whole stages in order outside a task: all first halves, then the second ones in reverse order."""
    with close_on_error([]) as pending:
        for fn in fns:
            suspended = start_stage(fn, ctx)
            pending += [] if suspended is None else [suspended]
        resume_stages(pending)


def composed_spec(kind: str, fns: Iterable[StageFn]) -> StageSpec:
    """Return the spec of several stages that are used as one."""
    return StageSpec(f"{kind}<{','.join(spec_of(fn).name for fn in fns)}>")


def with_lock(fn: StageFn, lock: Any) -> StageFn:
    """Return `fn`, each half of which runs while it holds `lock`."""

    @functools.wraps(fn)
    def locked(ctx: Any) -> Any:
        with lock:
            result = fn(ctx)
        return _lock_each_half(result, lock) if isinstance(result, GeneratorType) else result

    return locked


def _lock_each_half(halves: Generator, lock: threading.Lock) -> Generator[None, None, None]:
    with contextlib.closing(halves):
        while True:
            with lock:
                if next(halves, RETURNED) is RETURNED:
                    return
            yield
