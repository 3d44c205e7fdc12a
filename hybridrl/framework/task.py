"""The loop: runs stages in order over a context, step after step.

    with Task(ctx=OnlineRLContext()) as task:
        task.use_wrapper(StepTimer(print_per_step=10))
        task.use(next_batch).use(generate).use(update)
        task.run(max_step=100)

A stage is a function of the context, or a generator function with one `yield`. The code before the `yield` runs in the
order of registration (forward). The code after it runs in reverse order when all stages have run (backward). Stages run
in the calling thread, unless the task is asynchronous or overlaps them.

A single stage is `stage.py`, its halves `stage_halves.py`. Stages of stages: `composition.py`. Concurrent stages:
`overlap.py`. In `parallel/`: events and peers (`task_events.py`), labels and roles (`labels.py`), processes
(`runner.py`).
"""

import difflib
import functools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from hybridrl.errors import ConfigError
from hybridrl.framework.composition import Composition, ForkingExecutor
from hybridrl.framework.context import Context
from hybridrl.framework.events.event_loop import ListenerFn
from hybridrl.framework.events.labels import Role, StageLabels, VoidMiddleware, labels_of
from hybridrl.framework.overlap import DeviceSlots, OverlapPlan
from hybridrl.framework.stage import StageFn, StageSpec, declared_spec, spec_of, with_spec
from hybridrl.framework.stage_halves import Pending, close_suspended, resume_stages

logger = logging.getLogger(__name__)
Wrapper = Callable[[StageFn], StageFn]


class Task(Composition, StageLabels):
    """A loop: stages are added with `use`, then `run` executes its steps.

    Leaving its `with` block runs the exit hooks, also after an exception.

    Args:
        async_mode: Run all stages of a step concurrently, then all second halves.
        n_async_workers: Number of threads in async mode.
        ctx: Context of the first step; default an empty `Context`.
        middleware: Stages for `use`.
        step_wrappers: Wrappers for `use_step_wrapper`.
        event_listeners: Event -> listeners for `on`.
        once_listeners: Event -> listeners for `once`.
        attach_callback: Called first, with the context of the group to which this process was attached.
        labels: Labels of this process in addition to those of `labels_of`.
        auto_sync_ctx: In a group of processes, send the context to the peers after every step.

    Attributes:
        running: Whether the task has not been stopped yet.
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
        self.ctx = Context() if ctx is None else ctx  # of the current step, or of the last one
        self.async_mode = async_mode
        self.roles: set[Role] = set()
        self._stages: list[StageFn] = []
        self._num_filtered = 0  # stages left out by filter_labels or void
        self._wrappers: list[Wrapper] = []
        self.running = True
        self._is_in_run = False
        self._step_done = False
        self._by_hand = False  # the program ends steps itself, with `renew`
        self._exit_hooks: list[Callable[[], Any]] = []
        self._submitted: list[Future] = []  # stage halves that run in threads
        self._overlap: tuple[tuple[StageFn, ...], DeviceSlots, OverlapPlan] | None = None
        self._init_events(auto_sync_ctx=auto_sync_ctx)
        self._init_composition()
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
        """Reset the task as if newly constructed, for the module's task: `with task.start(): ...`.

        As in DI-engine v0.5.3 no context is sent to the peers, unless `auto_sync_ctx=True` is given.
        """
        self.stop()
        options.setdefault("auto_sync_ctx", False)
        self.__init__(async_mode, n_async_workers, ctx=ctx, labels=labels, **options)  # type: ignore[misc]
        return self

    def __reduce__(self) -> tuple:
        if self is task:
            return _module_task, ()  # unpickles as the receiving process's own
        raise TypeError("a Task belongs to one process and cannot be sent to another; make it in `main`")

    # -- adding stages

    @property
    def stages(self) -> list[StageSpec]:
        """The specs of the stages, in order."""
        return [spec_of(fn) for fn in self._stages]

    def use(self, fn: StageFn, filter_labels: Any = None, *, lock: Any = False) -> Self:
        """Append a stage and return the task.

        Args:
            fn: The stage; a `VoidMiddleware` is left out.
            filter_labels: Globs; the stage is left out where none of them matches a label of this process. As in
                DI-engine v0.5.3 a lock, or a bool, in this place is taken for `lock`.
            lock: A lock that the stage holds while it runs; True for the task's own.
        """
        if isinstance(filter_labels, bool) or hasattr(filter_labels, "acquire"):
            filter_labels, lock = None, filter_labels
        if isinstance(fn, VoidMiddleware) or (filter_labels and not self.match_labels(filter_labels)):
            self._num_filtered += 1
            return self
        self._stages.append(self._wrapped(self._with_lock(fn, lock), spec_of(fn)))
        return self

    def use_wrapper(self, wrapper: Wrapper) -> Self:
        """Wrap every present and future stage in `wrapper`, once each; the newest wrapper is outermost."""
        self._wrappers.append(wrapper)
        self._stages = [with_spec(wrapper(fn), spec_of(fn)) for fn in self._stages]
        return self

    def use_step_wrapper(self, wrapper: Wrapper) -> Self:
        """Wrap every call of a stage.

        This includes children of composed stages and functions given to `forward`.
        """
        self._step_wrappers.append(wrapper)
        return self

    def insert_before(self, name: str, fn: StageFn) -> Self:
        """Insert a stage before the stage `name`."""
        self._stages.insert(self._index(name), self._wrapped(fn, spec_of(fn)))
        return self

    def insert_after(self, name: str, fn: StageFn) -> Self:
        """Insert a stage after the stage `name`."""
        self._stages.insert(self._index(name) + 1, self._wrapped(fn, spec_of(fn)))
        return self

    def replace(self, name: str, fn: StageFn) -> Self:
        """Replace the stage `name`.

        A stage without its own spec gets the old one's.
        """
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

    # -- running

    def run(self, max_step: int = 10**12, *, overlap: DeviceSlots | None = None) -> None:
        """Run at most `max_step` steps, fewer when a stage, a listener or a peer sets `finish`.

        Afterwards `ctx` is the context of the last step, with `finish` set: after n steps `total_step` is n - 1. A
        later `run` continues with the next step. The end of a run also ends the runs of the peers. An exception of a
        stage keeps its type and gets a note with stage and step; suspended generators are closed.

        Args:
            max_step: Maximum number of steps.
            overlap: Role -> device slots; independent stages then run concurrently (see `overlap.py`).
        """
        if not self._stages:
            return self._check_no_stages()
        if overlap is not None and self.async_mode:
            raise ConfigError(
                "overlap= and async_mode=True both decide which stages run concurrently; give one of them"
            )
        self._start_stepping()
        self._is_in_run = True
        try:
            self._run_steps(max_step, overlap)
        finally:
            self._is_in_run = False
        if max_step > 0:
            self._send_finish()

    def _run_steps(self, max_step: int, overlap: DeviceSlots | None) -> None:
        for remaining in range(max_step, 0, -1):
            if self._step_done and not self._peer_finished:
                self.renew()
            if not self.finish:
                self._run_step(overlap)
                self._step_done = True
            if self.finish or remaining == 1:
                self.finish = True
                break

    def _check_no_stages(self) -> None:
        if not self._num_filtered:
            logger.warning("the task has no stages, so that run() returns at once; add some with use(fn)")
            return
        labels = ", ".join(sorted(self.labels))
        logger.info("no stage of the task is for this process (labels %s); nothing to run", labels)

    def _run_step(self, overlap: DeviceSlots | None) -> None:
        self._step_done = False
        if self._step_error is not None:
            self._wait_for_unfinished(stopping=False)
        try:
            if overlap is None:
                self._forward_all()
            else:
                self._forward_overlapped(overlap)
            self._run_second_halves()
        except BaseException as error:
            close_suspended(self._pending, error)
            raise
        self._send_context()

    def _forward_all(self) -> None:
        router, pending = self.router, self._pending
        for fn in tuple(self._stages):
            if router.failure is not None:
                router.raise_failure()
            if self.async_mode:
                self.forward(fn)
            else:
                self._start_stage(fn, self.ctx, pending)

    def _run_second_halves(self) -> None:
        if self._submitted:
            self.sync()
        if self._pending:
            self.backward().sync()
        self.router.raise_failure()

    def _forward_overlapped(self, slots: DeviceSlots) -> None:
        stages = tuple(self._stages)
        if self._overlap is None or self._overlap[:2] != (stages, slots):
            self._overlap = stages, slots, OverlapPlan(self.stages, slots)
        plan = self._overlap[2]
        self._threads.resize(plan.num_threads)
        pendings = plan.run(ForkingExecutor(self, stages, self.ctx))
        self._pending += [suspended for pending in pendings for suspended in pending]

    def forward(
        self,
        fn: StageFn,
        ctx: Context | None = None,
        backward_stack: Pending | None = None,
        *,
        async_mode: bool | None = None,
    ) -> Generator | None:
        """Run `fn` up to its `yield` and return the suspended generator, or None.

        Its second half runs in `backward`. In async mode `fn` is started in a thread, None is returned, and `sync`
        waits for it. Inside a stage `fn` always runs at once.
        """
        ctx = self.ctx if ctx is None else ctx
        stack = self._stack() if backward_stack is None else backward_stack
        if stack is self._pending and (self.async_mode if async_mode is None else async_mode):
            self._submitted.append(self._threads.submit(functools.partial(self._start_in_thread, fn, ctx)))
            return None
        suspended = self._start_stage(fn, ctx, stack)
        return None if suspended is None else suspended.generator

    def backward(self, backward_stack: Pending | None = None, *, async_mode: bool | None = None) -> Self:
        """Run the suspended second halves, last stage first.

        In async mode all first halves must have ended, so this waits for them. The second halves are started in
        threads, and `sync` waits for them.
        """
        stack = self._stack() if backward_stack is None else backward_stack
        if stack is self._pending and (self.async_mode if async_mode is None else async_mode):
            self.sync()
            while stack:
                self._submitted.append(self._threads.submit(functools.partial(resume_stages, [stack.pop()])))
        else:
            resume_stages(stack)
        return self

    def sync(self) -> Self:
        """Wait for all threads; the first exception is raised at once and ends the step."""
        submitted, self._submitted = self._submitted, []
        if submitted:
            for pending in self._wait_all(submitted):
                self._pending += pending
        return self

    def renew(self) -> Self:
        """Replace the context by that of the next step.

        In a loop by hand, `task.forward(fn); task.renew()`, this also ends the step as `run` does: second halves run,
        the context is sent to the peers, and so is `finish`, which the next context keeps.
        """
        if self._is_in_run:
            self.ctx = self.ctx.renew()
            return self
        self._end_step_by_hand()
        finish = self.finish
        self.ctx = self.ctx.renew()
        self._step_done = False
        self.finish = finish or self._peer_finished
        return self

    def _end_step_by_hand(self) -> None:
        self._start_stepping()
        try:
            self._run_second_halves()
        except BaseException as error:
            close_suspended(self._pending, error)
            raise
        self._by_hand = True
        self._send_context()
        if self.finish:
            self._send_finish()

    # -- stopping

    def on_exit(self, hook: Callable[[], Any]) -> None:
        """Call `hook` when the task stops, last registered first, also after failures."""
        self._exit_hooks.append(hook)

    def stop(self) -> None:
        """Stop the task: wait for its threads, emit `exit` locally and call the exit hooks.

        It may be called twice.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures: list[BaseException] = [] if error is None else [error]
        self._wait_for_unfinished(stopping=True)
        self.running = False
        hooks: list[Callable[[], Any]] = [*self._exit_hooks, functools.partial(self._local.emit, "exit")]
        self._exit_hooks = []
        if self._by_hand and error is None and not self.finish:
            hooks.append(self._send_finish)  # it may raise what a listener has raised; the others run all the same
        while hooks:
            try:
                hooks.pop()()
            except Exception as failure:
                failures.append(failure)
        self._close_events()
        for other in failures[1:]:
            failures[0].add_note(f"an exit hook failed too: {other!r}")
        if error is None and failures:
            raise failures[0]


task = Task()  # the task of this process, for programs with one loop: `with task.start(): ...`


def _module_task() -> Task:
    return task
