"""The loop: stages in order over a context, step after step.

    with Task(ctx=OnlineRLContext()) as task:
        task.use_wrapper(StepTimer())
        task.use(next_batch).use(generate).use(update)
        task.run(max_step=100)

A stage is a function of the context, or a generator function with one `yield`: what stands before it runs in the order
of registration (forward), what stands after it runs in reverse order when all stages have run (backward), like the
layers of an onion. Stages run in the calling thread, unless the task is asynchronous or overlaps them.

What one stage is: `stage.py`, and its halves `onion.py`. Stages of stages: `composition.py`. Events and peers:
`task_events.py`. Labels and roles: `roles.py`. Which stages may overlap: `overlap.py`. Several processes:
`parallel.py`.
"""

import difflib
import functools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from hybridrl.errors import ConfigError
from hybridrl.framework.composition import Composition
from hybridrl.framework.context import Context
from hybridrl.framework.overlap import OverlapPlan, Places
from hybridrl.framework.parallel.event_loop import ListenerFn
from hybridrl.framework.parallel.labels import Membership, Role, VoidMiddleware, labels_of
from hybridrl.framework.parallel.router import current_router
from hybridrl.framework.stage import StageFn, StageSpec, declared_spec, spec_of, with_spec
from hybridrl.framework.stage_halves import Pending, closing, run_second_halves

logger = logging.getLogger(__name__)
Wrapper = Callable[[StageFn], StageFn]


class Task(Composition, Membership):
    """A loop under construction and then in progress. Leaving its `with` block runs the exit hooks, whatever happened.

    async_mode: the stages of a step run at the same time, in `n_async_workers` threads, and so do then their second
    halves. middleware, step_wrappers, event_listeners, once_listeners: what `use`, `use_step_wrapper`, `on` and `once`
    are called with. attach_callback: called with the context of the group that this process was attached to, before
    anything else is done. labels: further labels. auto_sync_ctx: in a group of processes, the context is sent to the
    peers at the end of every step.
    """

    def __init__(
        self,
        async_mode: bool = False,
        n_async_workers: int = 3,
        *,
        ctx: Context | None = None,
        middleware: Iterable[StageFn] = (),
        step_wrappers: Iterable[Wrapper] = (),
        event_listeners: Mapping[str, Iterable[ListenerFn]] | None = None,
        once_listeners: Mapping[str, Iterable[ListenerFn]] | None = None,
        attach_callback: Callable[[Context], Any] | None = None,
        labels: Iterable[str] | None = None,
        auto_sync_ctx: bool = True,
    ) -> None:
        self.ctx = Context() if ctx is None else ctx  # of the step in progress, or of the last one
        self.async_mode = async_mode
        self.roles: set[Role] = set()
        self._stages: list[StageFn] = []
        self._left_out = 0  # stages that are not this process's
        self._wrappers: list[Wrapper] = []
        self._step_done = False
        self._exit_hooks: list[Callable[[], Any]] = []
        self._submitted: list[Future] = []  # halves of stages that run in threads
        self._overlap: tuple[tuple[StageFn, ...], Places, OverlapPlan] | None = None
        self._begin_events(current_router(), auto_sync_ctx=auto_sync_ctx)
        self._begin_composition()
        self._threads = self._new_threads(n_async_workers)
        self.labels = labels_of(self.router, async_mode=async_mode, own=labels or ())
        for fn in middleware:
            self.use(fn)
        for wrapper in step_wrappers:
            self.use_step_wrapper(wrapper)
        for listen, listeners in ((self.on, event_listeners), (self.once, once_listeners)):
            for event, fn in ((event, fn) for event, fns in (listeners or {}).items() for fn in fns):
                listen(event, fn)
        if attach_callback is not None:
            self._attach(attach_callback)

    def start(
        self,
        async_mode: bool = False,
        n_async_workers: int = 3,
        ctx: Context | None = None,
        labels: Iterable[str] | None = None,
        **options: Any,
    ) -> Self:
        """Begin anew, as if just constructed: for the task of the module, `with task.start(): ...`."""
        self.stop()
        self.__init__(async_mode, n_async_workers, ctx=ctx, labels=labels, **options)  # type: ignore[misc]
        return self

    def __reduce__(self) -> tuple:
        if self is task:
            return _the_task, ()  # in whatever process it arrives, it is that process's
        raise TypeError("a Task is the loop of one process and cannot be sent to another; make it in `main`")

    # -- building the loop

    @property
    def stages(self) -> list[StageSpec]:
        """What the stages say about themselves, in order."""
        return [spec_of(fn) for fn in self._stages]

    def use(self, fn: StageFn, filter_labels: Iterable[str] | None = None, *, lock: Any = False) -> Self:
        """Append a stage; not in a process none of whose labels matches the globs in `filter_labels`, and not a void
        one.

        lock: True, and no other such stage runs at the same time; or the lock that it has to hold.
        """
        if isinstance(fn, VoidMiddleware) or (filter_labels and not self.match_labels(filter_labels)):
            self._left_out += 1
            return self
        self._stages.append(self._wrapped(self._with_lock(fn, lock), spec_of(fn)))
        return self

    def use_wrapper(self, wrapper: Wrapper) -> Self:
        """Wrap every stage there is and every later one in `wrapper`, once each; the newest wrapper is outermost."""
        self._wrappers.append(wrapper)
        self._stages = [with_spec(wrapper(fn), spec_of(fn)) for fn in self._stages]
        return self

    def use_step_wrapper(self, wrapper: Wrapper) -> Self:
        """Wrap whatever runs, each time it does: stages, children of composed stages, and functions
        given to `forward`.
        """
        self._step_wrappers.append(wrapper)
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
            raise ConfigError(
                f"{names.count(name)} stages are called {name!r}; give them different names with @stage(name)"
            )
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"no stage is called {name!r}; there are {', '.join(names) or 'none'}{hint}")

    # -- running it

    def run(self, max_step: int = 10**12, *, overlap: Places | None = None) -> None:
        """Run at most `max_step` steps, fewer when a stage, a listener or a peer sets `finish`.

        `ctx` is left as the last step made it, with `finish` set, so after n steps `total_step` is n - 1; a later `run`
        goes on with the next step. A run that ends so also ends those of the peers. overlap: role -> device slots;
        stages that do not need each other then run at the same time (see `overlap.py`). A stage's exception keeps its
        type and gains a note with stage and step; generators that still waited are closed.
        """
        if not self._stages:
            return self._run_nothing()
        if overlap is not None and self.async_mode:
            raise ConfigError(
                "overlap= and async_mode=True are two answers to what may run at the same time; give one of them"
            )
        self._begin_stepping()
        for remaining in range(max_step, 0, -1):
            if self._step_done and not self._peer_finished:
                self.renew()
            if not self.finish:
                self._run_step(overlap)
                self._step_done = True
            if self.finish or remaining == 1:
                self.finish = True
                break
        if max_step > 0:
            self._share_finish()

    def _run_nothing(self) -> None:
        if not self._left_out:
            raise ConfigError("a task without stages cannot run; add some with use(fn)")
        logger.info("no stage of the task is for this process, which has the labels %s", ", ".join(sorted(self.labels)))

    def _run_step(self, overlap: Places | None) -> None:
        self._step_done = False
        if self._error is not None:
            self._wait_for_late(stopping=False)
        with closing(self._pending):
            if overlap is None:
                for fn in tuple(self._stages):
                    self.router.raise_failure()
                    self.forward(fn)
            else:
                self._forward_overlapped(overlap)
            self.sync()
            self.backward()
            self.sync()
            self.router.raise_failure()
        self._share_step()

    def _forward_overlapped(self, places: Places) -> None:
        stages = tuple(self._stages)
        if self._overlap is None or self._overlap[:2] != (stages, places):
            self._overlap = stages, places, OverlapPlan(self.stages, places)
        plan = self._overlap[2]
        self._threads.allow(plan.num_threads)
        pendings = plan.run(_ForkedStep(self, stages, self.ctx))
        self._pending += [half for pending in pendings for half in pending]

    def forward(
        self,
        fn: StageFn,
        ctx: Context | None = None,
        backward_stack: Pending | None = None,
        *,
        async_mode: bool | None = None,
    ) -> Generator | None:
        """Run `fn` up to its `yield`, where it has one, and return the waiting generator; its rest runs in `backward`.

        In async mode it is only begun, and None is returned; `sync` waits for it. Inside a stage, `fn` runs at once.
        """
        ctx = self.ctx if ctx is None else ctx
        stack = self._stack() if backward_stack is None else backward_stack
        if stack is self._pending and (self.async_mode if async_mode is None else async_mode):
            self._submitted.append(self._threads.submit(functools.partial(self._first_half_apart, fn, ctx)))
            return None
        half = self._first_half(fn, ctx, stack)
        return None if half is None else half.generator

    def backward(self, backward_stack: Pending | None = None, *, async_mode: bool | None = None) -> Self:
        """Run the second halves that wait, last stage first; in async mode begin them, for `sync` to wait for."""
        stack = self._stack() if backward_stack is None else backward_stack
        if stack is self._pending and (self.async_mode if async_mode is None else async_mode):
            while stack:
                self._submitted.append(self._threads.submit(functools.partial(run_second_halves, [stack.pop()])))
        else:
            run_second_halves(stack)
        return self

    def sync(self) -> Self:
        """Wait for what runs in threads. The first exception is raised at once and ends the step."""
        submitted, self._submitted = self._submitted, []
        if submitted:
            for pending in self._gather(submitted):
                self._pending += pending
        return self

    def renew(self) -> Self:
        """Make the context of the next step."""
        self.ctx = self.ctx.renew()
        return self

    # -- the end

    def on_exit(self, hook: Callable[[], Any]) -> None:
        """Call `hook` when the task stops, last registered first, whatever else fails."""
        self._exit_hooks.append(hook)

    def stop(self) -> None:
        """Wait for what still runs in threads, emit `exit` to local listeners and call the exit hooks.

        Safe to call twice.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures: list[BaseException] = [] if error is None else [error]
        self._wait_for_late(stopping=True)
        hooks = [*self._exit_hooks, functools.partial(self._local.emit, "exit")]
        self._exit_hooks = []
        while hooks:
            try:
                hooks.pop()()
            except Exception as failure:
                failures.append(failure)
        self._end_events()
        for later in failures[1:]:
            failures[0].add_note(f"an exit hook failed too: {later!r}")
        if error is None and failures:
            raise failures[0]


class _ForkedStep:
    """The stages of one step for an `OverlapPlan`: those that run beside others work on forks of its context."""

    def __init__(self, owner: Task, stages: tuple[StageFn, ...], ctx: Context) -> None:
        self._owner, self._stages, self._ctx = owner, stages, ctx
        self._forks: dict[int, Context] = {}

    def run_here(self, index: int) -> Pending:
        return self._owner._first_half_apart(self._stages[index], self._ctx)

    def begin(self, index: int) -> Future:
        fork = self._forks[index] = self._ctx.fork()
        return self._owner._threads.submit(functools.partial(self._owner._first_half_apart, self._stages[index], fork))

    def end(self, index: int, future: Future) -> Pending:
        pending = future.result()
        self._ctx.join(self._forks.pop(index))
        return pending

    def give_up(self, futures: list[Future], error: BaseException) -> None:
        self._owner._give_up(futures, error)


task = Task()  # the process's own, for programs that use one loop: `with task.start(): ...`


def _the_task() -> Task:
    return task
