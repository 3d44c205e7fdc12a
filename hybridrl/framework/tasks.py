"""The loop: runs stages in order over a context, step after step.

    with Task(ctx=OnlineRLContext()) as task:
        task.use_wrapper(StepTimer(print_per_step=10))
        task.use(next_batch).use(generate).use(update)
        task.run(max_step=100)

A stage is a function of the context, or a generator function with one `yield`. The code before the `yield` runs in the
order of registration (forward). The code after it runs in reverse order when all stages have run (backward). Stages run
in the calling thread, unless the task is asynchronous.

A single stage is `stage.py`, the halves of a step's stages `step_runner.py`. A task has three more parts, and loads
each one when it is first used: `composition.py` (stages of stages, threads), `events/task_events.py` (events, peers)
and `events/labels.py` (labels and roles of the process).
"""

import difflib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from hybridrl import framework
from hybridrl.errors import ConfigError
from hybridrl.framework.context import Context
from hybridrl.framework.events import ROUTERS, ListenerFn
from hybridrl.framework.stage import (
    DeviceSlots,
    StageFn,
    StageSpec,
    VoidMiddleware,
    Wrapper,
    declared_spec,
    spec_of,
    with_spec,
)
from hybridrl.framework.step_runner import StepRunner

logger = logging.getLogger(__name__)


class PartOf:
    """An attribute of a task that one of its parts has: `emit = PartOf("events")` is `task.events.emit`."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, task: Any, owner: type) -> Any:
        return self if task is None else getattr(getattr(task, self._part), self._name)


class Task:
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
        labels: Labels of this process in addition to those of `ProcessLabels`.
        auto_sync_ctx: In a group of processes, send the context to the peers after every step.

    Attributes:
        ctx: Context of the current step, or of the last one.
        running: Whether the task has not been stopped yet.
    """

    on, once, off, emit, wait_for = (PartOf("events") for _ in range(5))
    router, parallel_ctx, get_attch_to_len = (PartOf("events") for _ in range(3))
    forward, backward, sync = (PartOf("runner") for _ in range(3))
    serial, sequence, parallel, wrap = (PartOf("composition") for _ in range(4))
    labels, roles, role, match_labels = (PartOf("process_labels") for _ in range(4))
    add_role, has_role, void = (PartOf("process_labels") for _ in range(3))

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
        self.ctx = Context() if ctx is None else ctx
        self.async_mode, self.n_async_workers = async_mode, n_async_workers
        self.auto_sync_ctx, self._own_labels = auto_sync_ctx, tuple(labels or ())
        self.runner = StepRunner(self)
        self.running = True
        self._stages: list[StageFn] = []
        self._num_filtered = 0  # stages left out by filter_labels or void
        self._wrappers: list[Wrapper] = []
        self._is_in_run = False
        self._step_done = False
        self._by_hand = False  # the program ends steps itself, with `renew`
        self._exit_hooks: list[Callable[[], Any]] = []
        if n_async_workers < 1:
            raise ValueError(f"{n_async_workers} threads cannot run stages; give at least 1")
        if ROUTERS:
            self.events.connect()
        for fn in middleware:
            self.use(fn)
        for wrapper in step_wrappers:
            self.use_step_wrapper(wrapper)
        for once, listeners in ((False, event_listeners), (True, once_listeners)):
            for event, fn in ((event, fn) for event, fns in (listeners or {}).items() for fn in fns):
                (self.once if once else self.on)(event, fn)
        if attach_callback is not None:
            self.events.attach(attach_callback)

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
        vars(self).clear()
        options.setdefault("auto_sync_ctx", False)
        self.__init__(async_mode, n_async_workers, ctx=ctx, labels=labels, **options)  # type: ignore[misc]
        return self

    def __reduce__(self) -> tuple:
        raise TypeError("a Task belongs to one process and cannot be sent to another; make it in `main`")

    # -- parts, each loaded when it is first used

    @functools.cached_property
    def events(self) -> "framework.TaskEvents":
        """Events of the task, in this process and from its peers."""
        return framework.TaskEvents(self)

    @functools.cached_property
    def composition(self) -> "framework.Composition":
        """Stages of stages, and the threads of concurrent stages."""
        return framework.Composition(self)

    @functools.cached_property
    def process_labels(self) -> "framework.ProcessLabels":
        """Labels and roles of this process."""
        return framework.ProcessLabels(self.router, async_mode=self.async_mode, own=self._own_labels)

    def loaded(self, part: str) -> Any:
        """Return a part that was used; None for one that was not."""
        return vars(self).get(part)

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
        locked = self.composition.with_lock(fn, lock) if lock not in (False, None) else fn
        self._stages.append(self._wrapped(locked, spec_of(fn)))
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
        self.runner.wrappers.append(wrapper)
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

    @property
    def finish(self) -> bool:
        """Whether the current step is the last.

        A stage, a listener or a peer may set it.
        """
        return self.ctx.finish or self._peer_finished

    @finish.setter
    def finish(self, value: bool) -> None:
        self.ctx.finish = value
        if value and (events := self.loaded("events")):
            events.mailbox.wake()

    @property
    def _peer_finished(self) -> bool:
        events = self.loaded("events")
        return events is not None and events.peer_finished

    def run(self, max_step: int = 10**12, *, overlap: DeviceSlots | None = None, queued: bool = False) -> None:
        """Run at most `max_step` steps, fewer when a stage, a listener or a peer sets `finish`.

        Afterwards `ctx` is the context of the last step, with `finish` set: after n steps `total_step` is n - 1. A
        later `run` continues with the next step. The end of a run also ends the runs of the peers. An exception of a
        stage keeps its type and gets a note with stage and step; suspended generators are closed.

        Args:
            max_step: Maximum number of steps.
            overlap: Role -> device slots. Work that stages with `submits=True` start then runs beside other stages
                (see `overlap.py`). None: such a stage ends before the next one starts.
            queued: With `overlap`: roles that share a slot share its process, which does submitted work in line.
        """
        if not self._stages:
            return self._check_no_stages()
        if overlap is not None and self.async_mode:
            raise ConfigError(
                "overlap= and async_mode=True both decide which stages run concurrently; give one of them"
            )
        order = None if overlap is None else functools.partial(framework.schedule, slots=overlap, queued=queued)
        self.runner.set_order(order)
        if events := self.loaded("events"):
            events.start_stepping()
        self._is_in_run = True
        try:
            self._run_steps(max_step)
        finally:
            self._is_in_run = False
        if max_step > 0 and (events := self.loaded("events")):
            events.send_finish()

    def _run_steps(self, max_step: int) -> None:
        for remaining in range(max_step, 0, -1):
            if self._step_done and not self._peer_finished:
                self.renew()
            if not self.finish:
                self._run_step()
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

    def _run_step(self) -> None:
        self._step_done = False
        self.runner.run_step(tuple(self._stages))
        if events := self.loaded("events"):
            events.end_step()

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
        events = self.loaded("events")
        if events:
            events.start_stepping()
        self.runner.end_step()
        self._by_hand = True
        if events:
            events.end_step()
            if self.finish:
                events.send_finish()

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
        events = self.loaded("events")
        if composition := self.loaded("composition"):
            composition.wait_for_unfinished(stopping=True)
        self.running = False
        hooks, self._exit_hooks = self._exit_hooks, []
        if events:
            hooks.append(functools.partial(events.local.emit, "exit"))
            if self._by_hand and error is None and not self.finish:
                hooks.append(events.send_finish)  # it may raise what a listener has raised; the others run all the same
        while hooks:
            try:
                hooks.pop()()
            except Exception as failure:
                failures.append(failure)
        if events:
            events.close()
        for other in failures[1:]:
            failures[0].add_note(f"an exit hook failed too: {other!r}")
        if error is None and failures:
            raise failures[0]
