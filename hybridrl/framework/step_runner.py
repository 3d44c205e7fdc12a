"""`StepRunner`: the part of a task that calls its stages, in two halves: before their `yield`, and after it.

First halves run when they are called. Their second halves go on a stack: that of the task, or that of the composed
stage in progress. Everything runs in the calling thread, but what `composition.py` starts in others. On a failure, the
exception gets a note that names the stage, and suspended generators are closed.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any

from hybridrl.framework.stage import StageFn, StageSpec, Wrapper, spec_of, with_spec

Order = Sequence[tuple[int, bool]]  # indices of stages, and whether it is the end of what the stage submitted
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


class StepRunner:
    """Runs the stages of one step.

    Attributes:
        task: The task of which it is a part.
        pending: Stages of this step that wait for their second half.
        wrappers: Applied to every call of a stage.
        error: Exception of a stage of this step, while other stages of it may still run in threads.
    """

    def __init__(self, task: Any) -> None:
        self.task = task
        self.pending: Pending = []
        self.wrappers: list[Wrapper] = []
        self.error: BaseException | None = None
        self._of_thread = threading.local()  # .stack: where second halves go, default `pending`
        self.set_order(None)

    def set_order(self, order: Callable[[list[StageSpec]], Order] | None) -> None:
        """Set what makes the order of a step's halves of its stages. None: each stage ends before the next begins."""
        self._make_order = order
        self._order: tuple[tuple[StageFn, ...], Order] = (), []  # of these stages

    def run_step(self, stages: tuple[StageFn, ...]) -> None:
        """Run all stages of a step to their end; see `Task.run`."""
        if self.error is not None:
            self.task.composition.wait_for_unfinished(stopping=False)
        with close_on_error(self.pending):
            if self._make_order is None:
                for fn in stages:
                    self._raise_failure()
                    self.forward(fn)
            else:
                if self._order[0] != stages:
                    self._order = stages, self._make_order([spec_of(fn) for fn in stages])
                self._run_halves(*self._order)
        self.end_step()

    def _run_halves(self, stages: tuple[StageFn, ...], order: Order) -> None:
        submitted: dict[int, SuspendedStage | None] = {}
        for index, is_end in order:
            self._raise_failure()
            if not is_end:
                submitted[index] = self.start(stages[index], self.task.ctx, self.pending, whole=False)
            elif (suspended := submitted[index]) is not None:
                self.pending.remove(suspended)
                suspended.run()

    def end_step(self) -> None:
        """Run the second halves of the step that are left."""
        with close_on_error(self.pending):
            self.sync()
            if self.pending:
                self.backward()
                self.sync()
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the exception of a listener that a peer's event has called."""
        if events := self.task.loaded("events"):
            events.router.raise_failure()

    # -- halves

    def start(self, fn: StageFn, ctx: Any, stack: Pending, *, whole: bool = True) -> SuspendedStage | None:
        """Run `fn` up to its `yield`; children run by `wrap` or `forward` use the same stack.

        Args:
            fn: The stage.
            ctx: Its context.
            stack: Where the suspended stage goes.
            whole: Run a stage that submits work (`StageSpec.submits`) to its end.
        """
        for wrapper in self.wrappers:
            fn = with_spec(wrapper(fn), spec_of(fn))
        outer = self.stack()
        self._of_thread.stack = stack
        try:
            suspended = start_stage(fn, ctx, whole=whole)
        finally:
            self._of_thread.stack = outer
        if suspended is not None:
            stack.append(suspended)
        return suspended

    def stack(self) -> Pending:
        """Return where second halves go in this thread: to the task, or to the composed stage in progress."""
        return getattr(self._of_thread, "stack", self.pending)

    def forward(
        self, fn: StageFn, ctx: Any = None, backward_stack: Pending | None = None, *, async_mode: bool | None = None
    ) -> Generator | None:
        """Run `fn` up to its `yield` and return the suspended generator, or None.

        Its second half runs in `backward`. In async mode `fn` is started in a thread, None is returned, and `sync`
        waits for it. Inside a stage `fn` always runs at once.
        """
        ctx = self.task.ctx if ctx is None else ctx
        stack = self.stack() if backward_stack is None else backward_stack
        if self._is_async(stack, async_mode):
            self.task.composition.start_in_thread(fn, ctx)
            return None
        suspended = self.start(fn, ctx, stack)
        return None if suspended is None else suspended.generator

    def backward(self, backward_stack: Pending | None = None, *, async_mode: bool | None = None) -> Any:
        """Run the suspended second halves, last stage first, and return the task.

        In async mode all first halves must have ended, so this waits for them. The second halves are started in
        threads, and `sync` waits for them.
        """
        stack = self.stack() if backward_stack is None else backward_stack
        if self._is_async(stack, async_mode):
            self.task.composition.resume_in_threads(stack)
        else:
            resume_stages(stack)
        return self.task

    def _is_async(self, stack: Pending, chosen: bool | None) -> bool:
        return stack is self.pending and (self.task.async_mode if chosen is None else chosen)

    def sync(self) -> Any:
        """Wait for all threads, and return the task; the first exception is raised at once and ends the step."""
        if composition := self.task.loaded("composition"):
            composition.sync()
        return self.task


def start_stage(fn: StageFn, ctx: Any, *, whole: bool = True) -> SuspendedStage | None:
    """Run `fn` up to its `yield` and return the suspended stage.

    None means that there is no `yield`, or that it was not reached, or that the stage is `whole` and submits work.
    """
    try:
        result = fn(ctx)
        if not isinstance(result, GeneratorType) or next(result, RETURNED) is RETURNED:
            return None
    except BaseException as error:
        add_stage_note(error, spec_of(fn), ctx)
        raise
    suspended = SuspendedStage(fn, result, ctx)
    if whole and suspended.spec.submits:
        suspended.run()
        return None
    return suspended


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
    with close_on_error(pending):
        while pending:
            pending.pop().run()
    return pending


def run_once(fns: Iterable[StageFn], ctx: Any) -> None:
    """Run whole stages in order outside a task: all first halves, then the second ones in reverse order."""
    with close_on_error([]) as pending:
        for fn in fns:
            suspended = start_stage(fn, ctx)
            pending += [] if suspended is None else [suspended]
        resume_stages(pending)
