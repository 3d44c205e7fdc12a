"""The loop: stages in order over a context, step after step.

    with Task(ctx=OnlineRLContext()) as task:
        task.use_wrapper(StepTimer())
        task.use(next_batch).use(generate).use(update)
        task.run(max_step=100)

A stage is a function of the context, or a generator function with one `yield`: what stands before it runs in the order of
registration (forward), what stands after it runs in reverse order when all stages have run (backward), like the layers of
an onion. Stages run in the calling thread. This file schedules nothing and knows no process but its own.
"""

import contextlib
import difflib
from collections.abc import Callable, Generator
from types import GeneratorType, TracebackType
from typing import Any, Self

from hybridrl.framework.context import Context
from hybridrl.framework.events import Events, Listener
from hybridrl.framework.stage import StageFn, StageSpec, declared_spec, spec_of, with_spec

Pending = list[tuple[StageSpec, Generator]]
_RETURNED = object()  # what `next` gives for a generator that came to its end


class Task:
    """A loop under construction and then in progress. Leaving its `with` block runs the exit hooks, whatever happened."""

    def __init__(self, ctx: Context | None = None) -> None:
        self.ctx = Context() if ctx is None else ctx  # of the step in progress, or of the last one
        self._stages: list[StageFn] = []
        self._wrappers: list[Callable[[StageFn], StageFn]] = []
        self._pending: Pending = []  # stages of this step whose second half is still to run
        self._step_done = False
        self._events = Events()
        self._exit_hooks: list[Callable[[], Any]] = []

    # -- building the loop

    @property
    def stages(self) -> list[StageSpec]:
        """What the stages say about themselves, in order."""
        return [spec_of(fn) for fn in self._stages]

    def use(self, fn: StageFn) -> Self:
        """Append a stage."""
        self._stages.append(self._wrapped(fn, spec_of(fn)))
        return self

    def use_wrapper(self, wrapper: Callable[[StageFn], StageFn]) -> Self:
        """Wrap every stage there is and every later one in `wrapper`, once each; the newest wrapper is outermost."""
        self._wrappers.append(wrapper)
        self._stages = [with_spec(wrapper(fn), spec_of(fn)) for fn in self._stages]
        return self

    def insert_before(self, name: str, fn: StageFn) -> Self:
        """Put a stage in front of the one called `name`."""
        self._stages.insert(self._index(name), self._wrapped(fn, spec_of(fn)))
        return self

    def insert_after(self, name: str, fn: StageFn) -> Self:
        """Put a stage behind the one called `name`."""
        self._stages.insert(self._index(name) + 1, self._wrapped(fn, spec_of(fn)))
        return self

    def replace(self, name: str, fn: StageFn) -> Self:
        """Put a stage in the place of the one called `name`; without a spec of its own it takes over the other's."""
        index = self._index(name)
        self._stages[index] = self._wrapped(fn, declared_spec(fn) or spec_of(self._stages[index]))
        return self

    def serial(self, *fns: StageFn) -> StageFn:
        """Return one stage `serial<a,b>` that runs `fns` in order and, when its turn comes back, their second halves."""

        def run_in_order(ctx: Any) -> Generator[None, None, None]:
            pending: Pending = []
            with _closing(pending):
                for fn in fns:
                    self._forward(fn, ctx, pending)
                yield
                self._backward(ctx, pending)

        name = f"serial<{','.join(spec_of(fn).name for fn in fns)}>"
        return with_spec(run_in_order, StageSpec(name))

    def _wrapped(self, fn: StageFn, spec: StageSpec) -> StageFn:
        fn = with_spec(fn, spec)
        for wrapper in self._wrappers:
            fn = with_spec(wrapper(fn), spec)
        return fn

    def _index(self, name: str) -> int:
        names = [spec.name for spec in self.stages]
        if names.count(name) == 1:
            return names.index(name)
        if name in names:
            raise ValueError(f"{names.count(name)} stages are called {name!r}; give them different names with @stage(name)")
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"no stage is called {name!r}; there are {', '.join(names) or 'none'}{hint}")

    # -- running it

    @property
    def finish(self) -> bool:
        """Whether the step in progress is the last one; a stage or a listener may set it."""
        return self.ctx.finish

    @finish.setter
    def finish(self, value: bool) -> None:
        self.ctx.finish = value

    def run(self, max_step: int = 10**12) -> None:
        """Run at most `max_step` steps, fewer when a stage sets `finish`.

        `ctx` is left as the last step made it, with `finish` set; a later `run` goes on with the next step. A stage's
        exception keeps its type and gains a note with stage and step; generators that still waited are closed.
        """
        if not self._stages:
            raise ValueError("a task without stages cannot run; add some with use(fn)")
        for remaining in range(max_step, 0, -1):
            if self._step_done:
                self.ctx = self.ctx.renew()
            if self.finish:
                return
            self._run_step()
            self._step_done = True
            if self.finish or remaining == 1:
                self.finish = True
                return

    def _run_step(self) -> None:
        self._step_done = False
        with _closing(self._pending):
            for fn in tuple(self._stages):
                self.forward(fn)
            self.backward()

    def forward(self, fn: StageFn, ctx: Context | None = None) -> Generator | None:
        """Run `fn` up to its `yield`, where it has one, and return the waiting generator; its rest runs in `backward`."""
        return self._forward(fn, self.ctx if ctx is None else ctx, self._pending)

    def backward(self) -> None:
        """Run the second halves that wait, last stage first."""
        self._backward(self.ctx, self._pending)

    def _forward(self, fn: StageFn, ctx: Any, pending: Pending) -> Generator | None:
        spec = spec_of(fn)
        with _address(spec.name, ctx):
            result = fn(ctx)
            if not isinstance(result, GeneratorType) or next(result, _RETURNED) is _RETURNED:
                return None
        pending.append((spec, result))
        return result

    def _backward(self, ctx: Any, pending: Pending) -> None:
        while pending:
            spec, generator = pending.pop()
            with _address(spec.name, ctx):
                if next(generator, _RETURNED) is not _RETURNED:
                    generator.close()
                    raise RuntimeError("a stage may yield once; what stands behind its second yield would never run")

    # -- events and the end

    def on(self, event: str, fn: Listener) -> None:
        """Call `fn` at every `emit(event)`, in the emitter's thread."""
        self._events.on(event, fn)

    def once(self, event: str, fn: Listener) -> None:
        """Call `fn` at the next `emit(event)` only."""
        self._events.once(event, fn)

    def off(self, event: str, fn: Listener | None = None) -> None:
        """Forget `fn`, or every listener of `event`."""
        self._events.off(event, fn)

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the listeners of `event` one after the other; they have run when this returns."""
        self._events.emit(event, *args, **kwargs)

    def on_exit(self, hook: Callable[[], Any]) -> None:
        """Call `hook` when the `with` block is left, last registered first, whatever else fails."""
        self._exit_hooks.append(hook)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failures: list[BaseException] = [] if error is None else [error]
        while self._exit_hooks:
            try:
                self._exit_hooks.pop()()
            except Exception as failure:
                failures.append(failure)
        for later in failures[1:]:
            failures[0].add_note(f"an exit hook failed too: {later!r}")
        if error is None and failures:
            raise failures[0]


@contextlib.contextmanager
def _address(stage: str, ctx: Any) -> Generator[None, None, None]:
    """Let an exception pass with a note that says where it comes from."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in stage {stage!r} of step {ctx.total_step}")
        raise


@contextlib.contextmanager
def _closing(pending: Pending) -> Generator[None, None, None]:
    """If the block fails, end the generators that will not be resumed, so that their `finally` blocks run."""
    try:
        yield
    except BaseException as error:
        while pending:
            spec, generator = pending.pop()
            try:
                generator.close()
            except Exception as failure:
                error.add_note(f"closing stage {spec.name!r} failed too: {failure!r}")
        raise
