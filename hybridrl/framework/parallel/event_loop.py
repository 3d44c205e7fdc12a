"""Named events and who listens to them.

Listeners run in the emitter's thread, in order of registration, before `emit` returns.
"""

import fnmatch
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)
ListenerFn = Callable[..., Any]

# What is kept for listeners that are late: bounds for the case that there never is one.
MAX_KEPT_EVENTS = 1000
MAX_KEPT_BYTES = 256 * 1024**2


class Listener:
    """A function as it was registered.

    The same listener may stand in several loops: `once` counts for all of them together.
    """

    def __init__(self, fn: ListenerFn, *, once: bool = False) -> None:
        self.fn, self.once = fn, once
        self.gone = False  # taken off, or heard its only event
        self._deciding = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function, unless the listener is gone. Two threads that emit at once call a `once` listener once."""
        if self.once:
            with self._deciding:
                if self.gone:
                    return
                self.gone = True
        if self.once or not self.gone:
            self.fn(*args, **kwargs)


class EventLoop:
    """Who listens to what, in one process. A listener's exception ends the `emit` and reaches its caller.

    `EventLoop.get_event_loop(name)` is one loop per name and process. Safe to use from several threads.
    """

    _loops: dict[str, "EventLoop"] = {}

    def __init__(self, name: str = "default") -> None:
        self.name = name
        self._listeners: dict[str, list[Listener]] = {}
        self._lock = threading.Lock()

    @classmethod
    def get_event_loop(cls, name: str = "default") -> "EventLoop":
        """Return the loop of this name, which is made when it is first asked for."""
        return cls._loops.setdefault(name, cls(name))

    def on(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at every `emit(event)`."""
        self.add(event, Listener(fn))

    def once(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at the next `emit(event)` only."""
        self.add(event, Listener(fn, once=True))

    def add(self, event: str, listener: Listener) -> None:
        """Register a listener that was made already."""
        with self._lock:
            # A new list, so that an emit in progress goes on with the listeners it began with.
            self._listeners[event] = [*self._listeners.get(event, ()), listener]

    def off(self, event: str, fn: ListenerFn | None = None) -> None:
        """Forget `fn`, however it was registered, or every listener, of the events that match the glob `event`."""
        with self._lock:
            for name in fnmatch.filter(self._listeners, event):
                leaving = [entry for entry in self._listeners[name] if fn is None or entry.fn == fn]
                for entry in leaving:
                    entry.gone = True
                self._listeners[name] = [entry for entry in self._listeners[name] if entry not in leaving]

    def listened(self, event: str) -> bool:
        """Return whether anybody listens to `event`."""
        return any(not entry.gone for entry in self._listeners.get(event, ()))

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the listeners that `event` has now; those they add hear only the next one."""
        listeners = self._listeners.get(event, ())
        if any(entry.once for entry in listeners):
            with self._lock:
                self._listeners[event] = [entry for entry in self._listeners[event] if not entry.once]
        for entry in listeners:
            entry(*args, **kwargs)

    def stop(self) -> None:
        """Forget every listener, and the loop's name."""
        self.off("*")
        if EventLoop._loops.get(self.name) is self:
            del EventLoop._loops[self.name]


@dataclass
class Kept:
    """An event that a late listener may still want."""

    event: str
    args: tuple
    kwargs: dict
    num_bytes: int


class ReplayingLoop(EventLoop):
    """The loop for events from other processes. Who begins to listen late hears what came before, in order and once.

    All events are emitted by one thread, and `post` runs a function in that thread: registering is done there too, so
    that a new listener hears every event exactly once. `settle` ends the time in which a listener may be late.
    """

    def __init__(self, name: str, post: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(name)
        self._post = post
        self._kept: list[Kept] | None = []

    def add(self, event: str, listener: Listener) -> None:
        """Register a listener; it hears the kept events a moment later, in the emitting thread."""
        self._post(lambda: self._catch_up(event, listener))

    def _catch_up(self, event: str, listener: Listener) -> None:
        if listener.gone:
            return
        super().add(event, listener)
        for entry in tuple(self._kept or ()):
            if entry.event == event:
                listener(*entry.args, **entry.kwargs)

    def off(self, event: str, fn: ListenerFn | None = None) -> None:
        super().off(event, fn)
        self._post(lambda: EventLoop.off(self, event, fn))  # those whose registration is still under way

    def replay(self, event: str, args: tuple, kwargs: dict, *, num_bytes: int = 0, newest_only: bool = False) -> None:
        """Emit, and keep the event for listeners that are late; with `newest_only` instead of the earlier ones of its
        name.
        """
        if self._kept is not None:
            self._keep(Kept(event, args, kwargs, num_bytes), newest_only=newest_only)
        self.emit(event, *args, **kwargs)

    def _keep(self, new: Kept, *, newest_only: bool) -> None:
        kept = [entry for entry in self._kept or () if not (newest_only and entry.event == new.event)]
        room = MAX_KEPT_BYTES - sum(entry.num_bytes for entry in kept) - new.num_bytes
        while kept and (room < 0 or len(kept) >= MAX_KEPT_EVENTS):
            dropped = kept.pop(0)
            room += dropped.num_bytes
            if not self.listened(dropped.event):
                logger.warning(
                    "an event %r that nobody listens to yet was dropped, so many came after it", dropped.event
                )
        self._kept = [*kept, new]

    def settle(self) -> None:
        """From here on nothing is kept."""
        self._post(self._forget)

    def _forget(self) -> None:
        self._kept = None
