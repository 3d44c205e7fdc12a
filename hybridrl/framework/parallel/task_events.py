"""Events of a task, in this process and from its peers, and what peers' contexts become here. Knows no stages.

A local emit calls its listeners in the emitter's thread before it returns. Peers hear it in a thread of their own, in
the order in which one process emitted. `wait_for` gives one event to whoever waits: the oldest of this step or the last
that nobody waited for, or the next.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hybridrl.framework.context import Context
from hybridrl.framework.parallel.event_loop import EventLoop, Listener, ListenerFn, ReplayingLoop
from hybridrl.framework.parallel.router import Router

SYNC_EVENT = "sync_parallel_ctx"  # heard when a peer's context has arrived, with it as the argument
EVENT, CONTEXT, FINISH = "task.event", "task.context", "task.finish"  # topics of the router

MAX_UNCLAIMED = 16  # events of one name that `wait_for` may still find; what nobody waits for must not pile up
Heard = tuple[tuple, dict]


class Mailbox:
    """Events for `wait_for`. One that nobody waits for is kept until the step after its own has ended: whoever answers
    an event with another one cannot know whether the first emitter waits already.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, list[list[Heard]]] = {}
        self._unclaimed: dict[str, deque[tuple[int, Heard]]] = {}  # event -> (step in which it came, what)
        self._step = 0

    def put(self, event: str, args: tuple, kwargs: dict, *, newest_only: bool = False) -> None:
        """Give an event to all who wait for it, or keep it; with `newest_only` in place of the earlier ones of its
        name.
        """
        with self._changed:
            waiting = self._waiting.pop(event, None)
            if waiting is None:
                unclaimed = self._unclaimed.setdefault(event, deque(maxlen=MAX_UNCLAIMED))
                if newest_only:
                    unclaimed.clear()
                unclaimed.append((self._step, (args, kwargs)))
                return
            for slot in waiting:
                slot.append((args, kwargs))
            self._changed.notify_all()

    def take(self, event: str, timeout: float, stopped: Callable[[], bool]) -> Heard | None:
        """Return the oldest unclaimed event of this name, or the next; None when `timeout` seconds are over or
        `stopped()` is true.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            if unclaimed := self._unclaimed.get(event):
                return unclaimed.popleft()[1]
            slot: list[Heard] = []
            self._waiting.setdefault(event, []).append(slot)
            while not slot and not stopped() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(None if math.isinf(left) else left)
            if not slot:
                self._forget(event, slot)
            return slot[0] if slot else None

    def _forget(self, event: str, slot: list[Heard]) -> None:
        waiting = [other for other in self._waiting.get(event, []) if other is not slot]
        self._waiting = {name: slots for name, slots in self._waiting.items() if name != event}
        if waiting:
            self._waiting[event] = waiting

    def wake(self) -> None:
        """Let all who wait look whether they are stopped."""
        with self._changed:
            self._changed.notify_all()

    def end_step(self) -> None:
        """Drop what came before this step and was not claimed in it."""
        with self._changed:
            for event, unclaimed in tuple(self._unclaimed.items()):
                while unclaimed and unclaimed[0][0] < self._step:
                    unclaimed.popleft()
                if not unclaimed:
                    del self._unclaimed[event]
            self._step += 1


class TaskEvents:
    """The part of a task that emits and listens. `router` is this process's; without peers everything is local."""

    ctx: Context
    async_mode: bool

    def _begin_events(self, router: Router, *, auto_sync_ctx: bool) -> None:
        self.router = router
        self.parallel_ctx = Context()  # the newest context that a peer has sent at the end of a step
        self._auto_sync_ctx = auto_sync_ctx
        self._local = EventLoop("task")
        self._mailbox = Mailbox()
        self._peer_finished = False
        self._building = True  # until the first step begins, and with it the time in which a listener may be late
        self._topics: dict[str, ListenerFn] = {}
        self._remote: ReplayingLoop | None = None
        if router.is_active:
            self._remote = ReplayingLoop("peers", router.post)
            self._topics = {EVENT: self._hear_event, CONTEXT: self._hear_context, FINISH: self._hear_finish}
            for topic, fn in self._topics.items():
                router.on(topic, fn)
            router.on_failure.append(self._stop_early)

    def _end_events(self) -> None:
        for topic, fn in self._topics.items():
            self.router.off(topic, fn)
        self._topics = {}

    # -- for stages and whoever builds the loop

    def on(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at every `emit(event)`, here in the emitter's thread and from peers in the router's."""
        self._listen(event, Listener(fn))

    def once(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at the next `emit(event)` only, wherever it comes from."""
        self._listen(event, Listener(fn, once=True))

    def _listen(self, event: str, listener: Listener) -> None:
        self._local.add(event, listener)
        if self._remote is not None:
            self._remote.add(event, listener)

    def off(self, event: str, fn: ListenerFn | None = None) -> None:
        """Forget `fn`, however it was registered, or every listener, of the events that match the glob `event`."""
        self._local.off(event, fn)
        if self._remote is not None:
            self._remote.off(event, fn)

    def emit(self, event: str, *args: Any, only_remote: bool = False, only_local: bool = False, **kwargs: Any) -> None:
        """Tell all who listen to `event`. Local listeners have run when this returns, peers have got it as the
        arguments are now.

        A listener's exception is raised here, or for a peer's listener in that peer.
        """
        if only_remote and only_local:
            raise ValueError(
                f"emit({event!r}) with only_remote and only_local reaches nobody; give one of them or none"
            )
        if self.router.is_active and not only_local:
            self.router.send(EVENT, (event, args, kwargs), {})
        if not only_remote:
            self._mailbox.put(event, args, kwargs)
            self._local.emit(event, *args, **kwargs)

    def wait_for(self, event: str, timeout: float = math.inf, ignore_timeout_exception: bool = True) -> Heard | None:
        """Return (args, kwargs) of an `emit(event)`, from here or from a peer.

        That is the oldest one of this step or the last that nobody has waited for, or else the next. When `timeout`
        seconds are over, or the task is to finish: None, or TimeoutError if `ignore_timeout_exception` is False. If
        another stage failed: RuntimeError.
        """
        if math.isinf(timeout) and not self.async_mode and not self.router.is_active:
            raise RuntimeError(
                f"wait_for({event!r}) would wait for ever: stages run one after the other here; give it a timeout"
            )
        heard = self._mailbox.take(event, timeout, lambda: self.finish or self._failed())
        if heard is not None:
            return heard
        self.router.raise_failure()
        if self._failed():
            raise RuntimeError(f"wait_for({event!r}) is given up because another stage failed")
        if ignore_timeout_exception:
            return None
        raise TimeoutError(
            f"the task finished before {event!r} came" if self.finish else f"no {event!r} came within {timeout:g} s"
        )

    @property
    def finish(self) -> bool:
        """Whether the step in progress is the last one; a stage, a listener or a peer may set it."""
        return self._peer_finished or self.ctx.finish

    @finish.setter
    def finish(self, value: bool) -> None:
        self.ctx.finish = value
        if value:
            self._mailbox.wake()

    def _failed(self) -> bool:
        """Whether a stage of this step, or a listener, has raised."""
        return self.router.failure is not None

    # -- from peers, in the router's thread

    def _hear_event(self, event: str, args: tuple, kwargs: dict) -> None:
        # What listeners hear may be large, weights for instance: only the newest is kept for somebody who may wait for
        # it.
        heard = event == SYNC_EVENT or (self._remote is not None and self._remote.listened(event))
        self._mailbox.put(event, args, kwargs, newest_only=heard)
        if self._remote is not None:
            self._remote.replay(
                event, args, kwargs, num_bytes=self.router.message_bytes, newest_only=event == SYNC_EVENT
            )

    def _hear_context(self, ctx: Context) -> None:
        self.parallel_ctx = ctx
        self._hear_event(SYNC_EVENT, (ctx,), {})
        if ctx.finish:
            self._stop_early()

    def _hear_finish(self) -> None:
        self._stop_early()

    def _stop_early(self) -> None:
        # In this order: whoever makes the next step's context looks at the first after having made it.
        self._peer_finished = True
        self.ctx.finish = True
        self._mailbox.wake()

    # -- to peers

    def _begin_stepping(self) -> None:
        """Everybody listens who wants to hear what came while the loop was built."""
        if self._building and self.router.is_active:
            self.router.flush()
            self.router.settle()
            if self._remote is not None:
                self._remote.settle()
        self._building = False

    def _share_step(self) -> None:
        """Send the context that a step has left."""
        self._mailbox.end_step()
        if self.router.is_active and self._auto_sync_ctx:
            self.router.send(CONTEXT, (self.ctx,), {}, newest_only=True, lasting=True)

    def _share_finish(self) -> None:
        if self.router.is_active:
            self.router.send(FINISH, (), {}, lasting=True)
            self.router.flush()
            self.router.raise_failure()

    def _attach(self, callback: Callable[[Context], Any], timeout_s: float = 30.0) -> None:
        """Call `callback` with the context of a group that this process was attached to.

        TimeoutError when none comes in time.
        """
        if self.router.attached_to:
            heard = self._mailbox.take(SYNC_EVENT, timeout_s, self._failed)
            self.router.raise_failure()
            if heard is None:
                raise TimeoutError(
                    f"{', '.join(self.router.attached_to)} sent no context within {timeout_s:g} s; do they run steps?"
                )
            callback(*heard[0])
