"""Events and contexts of a task, within this process and from its peers.

`TaskEvents` is a part of a task, loaded when it is first used; it does not handle stages. A local emit calls its
listeners in the emitter's thread before it returns. Events from peers are handled in the router's thread, in the order
in which one process emitted them. `wait_for` returns an unclaimed event of this step or the last, or else the next one.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hybridrl.framework.context import Context
from hybridrl.framework.events import ListenerFn
from hybridrl.framework.events.event_loop import EventLoop, Listener, ReplayingLoop
from hybridrl.framework.events.local_peers import LocalPeers, current_router

SYNC_EVENT = "sync_parallel_ctx"  # emitted when a peer's context has arrived; its argument is the context
EVENT, CONTEXT, FINISH = "task.event", "task.context", "task.finish"  # topics of the router

MAX_UNCLAIMED = 16  # kept events of one name for `wait_for`; the oldest are dropped
EventArgs = tuple[tuple, dict]


class Mailbox:
    """Events for `wait_for`.

    An event for which nothing waits is kept until the end of the step after its own. The reason: a process that answers
    an event cannot know whether the first emitter already waits for the answer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiters: dict[str, list[list[EventArgs]]] = {}
        self._unclaimed: dict[str, deque[tuple[int, EventArgs]]] = {}  # event -> (step of arrival, arguments)
        self._step = 0

    def put(self, event: str, args: tuple, kwargs: dict, *, newest_only: bool = False) -> None:
        """Give an event to all waiters, or keep it.

        Args:
            event: Name of the event.
            args: Positional arguments of the emit.
            kwargs: Keyword arguments of the emit.
            newest_only: Replace kept events of the same name.
        """
        with self._changed:
            waiting = self._waiters.pop(event, None)
            if waiting is None:
                unclaimed = self._unclaimed.setdefault(event, deque(maxlen=MAX_UNCLAIMED))
                if newest_only:
                    unclaimed.clear()
                unclaimed.append((self._step, (args, kwargs)))
                return
            for slot in waiting:
                slot.append((args, kwargs))
            self._changed.notify_all()

    def wait_for(self, event: str, timeout: float, stopped: Callable[[], bool]) -> EventArgs | None:
        """Return the oldest unclaimed event of this name, or the next one.

        None is returned after `timeout` seconds, or when `stopped()` is true.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            if unclaimed := self._unclaimed.get(event):
                return unclaimed.popleft()[1]
            slot: list[EventArgs] = []
            self._waiters.setdefault(event, []).append(slot)
            while not slot and not stopped() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(None if math.isinf(left) else left)
            if not slot:
                self._remove_waiter(event, slot)
            return slot[0] if slot else None

    def _remove_waiter(self, event: str, slot: list[EventArgs]) -> None:
        waiting = [other for other in self._waiters.get(event, []) if other is not slot]
        self._waiters = {name: slots for name, slots in self._waiters.items() if name != event}
        if waiting:
            self._waiters[event] = waiting

    def wake(self) -> None:
        """Make all waiters check `stopped()`."""
        with self._changed:
            self._changed.notify_all()

    def end_step(self) -> None:
        """Drop events of earlier steps that were not claimed in this one."""
        if not self._unclaimed:  # an event that arrives meanwhile counts for either step
            self._step += 1
            return
        with self._changed:
            for event, unclaimed in tuple(self._unclaimed.items()):
                while unclaimed and unclaimed[0][0] < self._step:
                    unclaimed.popleft()
                if not unclaimed:
                    del self._unclaimed[event]
            self._step += 1


def unpicklable_keys(ctx: Context) -> list[str]:
    """Return the keys of a context whose values cannot be pickled."""
    import cloudpickle

    keys = []
    for key in ctx:
        try:
            cloudpickle.dumps(ctx[key])  # not `ctx.items()`: a value may have this name
        except Exception:
            keys.append(repr(key))
    return keys


class TaskEvents:
    """Emits events and listens to them.

    Attributes:
        local: Listeners of this process.
        mailbox: Events for `wait_for`.
        parallel_ctx: The newest context that a peer sent at the end of a step.
        peer_finished: Whether a peer ended the run.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self.parallel_ctx = Context()
        self.local = EventLoop("task")
        self.mailbox = Mailbox()
        self.peer_finished = False
        self._building = True  # until the first step; until then events are buffered for late listeners
        self._topics: dict[str, ListenerFn] = {}
        self._remote: ReplayingLoop | None = None

    @property
    def router(self) -> LocalPeers:
        """The router of this process; without peers all events are local."""
        return current_router()

    def get_attch_to_len(self) -> int:
        """Return the number of processes of other groups to which this one is attached; DI-engine's spelling.

        Raises:
            RuntimeError: The process belongs to no group.
        """
        if not self.router.is_active:
            raise RuntimeError("get_attch_to_len: this process belongs to no group, so that it is attached to none")
        return self.router.get_attch_to_len()

    def connect(self) -> None:
        """Receive what the peers of this process send, if it has any, until `close`."""
        router = self.router
        if router.is_active:
            self._remote = ReplayingLoop("peers", router.post)
            self._topics = {EVENT: self._on_event, CONTEXT: self._on_context, FINISH: self._finish_early}
            for topic, fn in self._topics.items():
                router.on(topic, fn)
            router.finish_hooks.append(self._finish_early)

    def close(self) -> None:
        """Stop receiving from peers."""
        for topic, fn in self._topics.items():
            self.router.off(topic, fn)
        if self._topics and self._finish_early in self.router.finish_hooks:
            self.router.finish_hooks.remove(self._finish_early)
        self._topics = {}

    # -- for stages and the program

    def on(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at every `emit(event)`: in the emitter's thread, or for peers in the router's."""
        self._add_listener(event, Listener(fn))

    def once(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at the next `emit(event)` only, local or from a peer."""
        self._add_listener(event, Listener(fn, once=True))

    def _add_listener(self, event: str, listener: Listener) -> None:
        self.local.add(event, listener)
        if self._remote is not None:
            self._remote.add(event, listener)

    def off(self, event: str, fn: ListenerFn | None = None) -> None:
        """Remove `fn`, or every listener, from the events that match the glob `event`."""
        self.local.off(event, fn)
        if self._remote is not None:
            self._remote.off(event, fn)

    def emit(
        self,
        event: str,
        *args: Any,
        only_remote: bool = False,
        only_local: bool = False,
        newest_only: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send `event` to all listeners. It never waits for a peer.

        When this returns, local listeners have run, and the arguments in their present state are sent to the peers. An
        exception of a local listener is raised here, that of a peer's listener in the peer.

        Args:
            event: Name of the event.
            *args: Positional arguments of the listeners.
            only_remote: Do not call local listeners.
            only_local: Do not send to peers.
            newest_only: Replace earlier events of this name that a peer has not handled yet, such as old weights.
                Without it a peer handles all of them, up to the limits of `message_queue.py`.
            **kwargs: Keyword arguments of the listeners.
        """
        if only_remote and only_local:
            raise ValueError(
                f"emit({event!r}) with only_remote and only_local reaches no listener; give one of them or none"
            )
        if self.router.is_active and not only_local:
            self.router.send(EVENT, (event, args, kwargs, newest_only), {}, event=event, newest_only=newest_only)
        if not only_remote:
            self.mailbox.put(event, args, kwargs, newest_only=newest_only)
            self.local.emit(event, *args, **kwargs)

    def wait_for(
        self, event: str, timeout: float = math.inf, ignore_timeout_exception: bool = True
    ) -> EventArgs | None:
        """Return (args, kwargs) of an `emit(event)`, local or from a peer.

        It is the oldest unclaimed one of this step or the last, or else the next.

        Args:
            event: Name of the event.
            timeout: Seconds.
            ignore_timeout_exception: Return None on a timeout and when the task finishes.

        Raises:
            TimeoutError: Timeout or end of the task, if `ignore_timeout_exception` is False.
            RuntimeError: Another stage failed, or the wait could never end.
        """
        if math.isinf(timeout) and not self._task.async_mode and not self.router.is_active:
            raise RuntimeError(
                f"wait_for({event!r}) would never end: stages run one after the other here; give it a timeout"
            )
        received = self.mailbox.wait_for(event, timeout, lambda: self._task.finish or self._failed())
        if received is not None:
            return received
        self.router.raise_failure()
        if self._failed():
            raise RuntimeError(f"wait_for({event!r}) was cancelled because another stage failed")
        if ignore_timeout_exception:
            return None
        raise TimeoutError(
            f"the task finished before {event!r} arrived"
            if self._task.finish
            else f"no {event!r} arrived within {timeout:g} s"
        )

    def _failed(self) -> bool:
        """Return whether a stage of this step, or a listener, has raised."""
        return self._task.runner.error is not None or self.router.failure is not None

    # -- from peers, in the router's thread

    def _on_event(self, event: str, args: tuple, kwargs: dict, newest_only: bool) -> None:
        # Events with listeners may be large, weights for instance: of these only the newest is kept for `wait_for`.
        has_listener = self._remote is not None and self._remote.has_listener(event)
        self.mailbox.put(event, args, kwargs, newest_only=newest_only or has_listener)
        if self._remote is not None:
            self._remote.emit_and_buffer(
                event, args, kwargs, num_bytes=self.router.message_bytes, newest_only=newest_only
            )

    def _on_context(self, ctx: Context) -> None:
        self.parallel_ctx = ctx
        self._on_event(SYNC_EVENT, (ctx,), {}, newest_only=True)
        if ctx.finish:
            self._finish_early()

    def _finish_early(self) -> None:
        # In this order: the thread that makes the next step's context reads `peer_finished` after making it.
        self.peer_finished = True
        self._task.ctx.finish = True
        self.mailbox.wake()

    # -- to peers

    def start_stepping(self) -> None:
        """Handle what arrived while the loop was built; from here on nothing is buffered."""
        if self._building and self.router.is_active:
            self.router.flush()
            self.router.stop_buffering()
            if self._remote is not None:
                self._remote.stop_buffering()
        self._building = False

    def end_step(self) -> None:
        """Forget events of earlier steps, and send the context to the peers."""
        self.mailbox.end_step()
        if self.router.is_active and self._task.auto_sync_ctx:
            try:
                self.router.send(CONTEXT, (self._task.ctx,), {}, newest_only=True, retained=True)
            except Exception as error:
                if keys := unpicklable_keys(self._task.ctx):
                    error.add_note(
                        f"after a step the context is sent to the peers, and its {', '.join(keys)} cannot be pickled; "
                        "remove it in a last stage with ctx.pop(...), or send no contexts: Task(auto_sync_ctx=False)"
                    )
                raise

    def send_finish(self) -> None:
        """End the runs of the peers."""
        if self.router.is_active:
            self.router.send(FINISH, (), {}, newest_only=True, retained=True)  # so that it is never dropped
            self.router.flush()
            self.router.raise_failure()

    def attach(self, callback: Callable[[Context], Any], timeout_s: float = 30.0) -> None:
        """Call `callback` with the context of a group to which this process is attached.

        Raises:
            TimeoutError: No context arrived within `timeout_s`.
        """
        if self.router.attached_to:
            received = self.mailbox.wait_for(SYNC_EVENT, timeout_s, self._failed)
            self.router.raise_failure()
            if received is None:
                raise TimeoutError(
                    f"{', '.join(self.router.attached_to)} sent no context within {timeout_s:g} s; do they run steps?"
                )
            callback(*received[0])
