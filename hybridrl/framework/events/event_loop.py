"""Named events and their listeners within one process.

Listeners run in the emitter's thread, in order of registration, before `emit` returns.
"""

import fnmatch
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrl.framework.events import ListenerFn

logger = logging.getLogger(__name__)

# Limits of the buffer for late listeners, in case that no listener is ever registered.
MAX_BUFFERED_EVENTS = 1000
MAX_BUFFERED_BYTES = 256 * 1024**2
LISTENER_NOTE = "in a listener of the event"


class Listener:
    """A registered function.

    A listener may be registered in several loops; `once` then counts for all of them together.
    """

    def __init__(self, fn: ListenerFn, *, once: bool = False) -> None:
        self.fn, self.once = fn, once
        self.removed = False  # by `off`, or after the only event of a `once` listener
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function, unless the listener was removed.

        Two threads that emit at the same time call a `once` listener once.
        """
        if self.once:
            with self._lock:
                if self.removed:
                    return
                self.removed = True
        if self.once or not self.removed:
            self.fn(*args, **kwargs)


class EventLoop:
    """The listeners of one process, by event.

    An exception of a listener ends the `emit` and is raised to its caller. All methods are thread-safe.
    """

    _loops: dict[str, "EventLoop"] = {}
    _origin = ""  # of its events, for the note

    def __init__(self, name: str = "default") -> None:
        self.name = name
        self._listeners: dict[str, list[Listener]] = {}
        self._lock = threading.Lock()

    @classmethod
    def get_event_loop(cls, name: str = "default") -> "EventLoop":
        """Return the loop of this name in this process; the first call creates it."""
        return cls._loops.setdefault(name, cls(name))

    def on(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at every `emit(event)`."""
        self.add(event, Listener(fn))

    def once(self, event: str, fn: ListenerFn) -> None:
        """Call `fn` at the next `emit(event)` only."""
        self.add(event, Listener(fn, once=True))

    def add(self, event: str, listener: Listener) -> None:
        """Register an existing listener."""
        with self._lock:
            # A new list, so that an emit in progress keeps the listeners with which it started.
            self._listeners[event] = [*self._listeners.get(event, ()), listener]

    def off(self, event: str, fn: ListenerFn | None = None) -> None:
        """Remove `fn`, or every listener, from the events that match the glob `event`."""
        with self._lock:
            for name in fnmatch.filter(self._listeners, event):
                removed = [entry for entry in self._listeners[name] if fn is None or entry.fn == fn]
                for entry in removed:
                    entry.removed = True
                self._listeners[name] = [entry for entry in self._listeners[name] if entry not in removed]

    def has_listener(self, event: str) -> bool:
        """Return whether `event` has a listener."""
        return any(not entry.removed for entry in self._listeners.get(event, ()))

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the present listeners of `event`; listeners that they add wait for the next emit."""
        listeners = self._listeners.get(event, ())
        if any(entry.once for entry in listeners):
            with self._lock:
                self._listeners[event] = [entry for entry in self._listeners[event] if not entry.once]
        for entry in listeners:
            self._call(event, entry, args, kwargs)

    def _call(self, event: str, listener: Listener, args: tuple, kwargs: dict) -> None:
        try:
            listener(*args, **kwargs)
        except BaseException as error:
            if not any(note.startswith(LISTENER_NOTE) for note in getattr(error, "__notes__", ())):
                error.add_note(f"{LISTENER_NOTE} {event!r}{self._origin}")
            raise

    def stop(self) -> None:
        """Remove every listener and the loop's name."""
        self.off("*")
        if EventLoop._loops.get(self.name) is self:
            del EventLoop._loops[self.name]


@dataclass
class BufferedEvent:
    """An event that is kept for listeners registered after it."""

    event: str
    args: tuple
    kwargs: dict
    num_bytes: int
    key: str


class ReplayingLoop(EventLoop):
    """Loop for events from other processes, with a buffer for late listeners.

    A listener that is registered late receives the buffered events first, in order and once. One thread emits all
    events. `post` runs a function in that thread, and registration happens there too, so that a new listener receives
    every event exactly once. `stop_buffering` drops the buffer.
    """

    _origin = " of a peer"

    def __init__(self, name: str, post: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(name)
        self._post = post
        self._buffer: list[BufferedEvent] | None = []

    def add(self, event: str, listener: Listener) -> None:
        """Register a listener; the emitting thread replays the buffered events to it."""
        self._post(lambda: self._replay_to(event, listener))

    def _replay_to(self, event: str, listener: Listener) -> None:
        if listener.removed:
            return
        super().add(event, listener)
        for entry in tuple(self._buffer or ()):
            if entry.event == event:
                self._call(event, listener, entry.args, entry.kwargs)

    def off(self, event: str, fn: ListenerFn | None = None) -> None:
        super().off(event, fn)
        self._post(lambda: EventLoop.off(self, event, fn))  # listeners whose registration is still queued

    def emit_and_buffer(
        self, event: str, args: tuple, kwargs: dict, *, num_bytes: int = 0, newest_only: bool = False, key: str = ""
    ) -> None:
        """Emit, and buffer the event for late listeners.

        Args:
            event: Name of the event.
            args: Positional arguments of the listeners.
            kwargs: Keyword arguments of the listeners.
            num_bytes: Size of the event, for the limit of the buffer.
            newest_only: Replace buffered events of the same name and key.
            key: Part of the name that listeners do not choose by.
        """
        if self._buffer is not None:
            self._add_to_buffer(BufferedEvent(event, args, kwargs, num_bytes, key), newest_only=newest_only)
        self.emit(event, *args, **kwargs)

    def _add_to_buffer(self, new: BufferedEvent, *, newest_only: bool) -> None:
        same = new.event, new.key
        buffered = [entry for entry in self._buffer or () if not (newest_only and (entry.event, entry.key) == same)]
        free_bytes = MAX_BUFFERED_BYTES - sum(entry.num_bytes for entry in buffered) - new.num_bytes
        while buffered and (free_bytes < 0 or len(buffered) >= MAX_BUFFERED_EVENTS):
            dropped = buffered.pop(0)
            free_bytes += dropped.num_bytes
            if not self.has_listener(dropped.event):
                logger.warning(
                    "dropped an event %r: it has no listener yet, and the buffer for late listeners is full",
                    dropped.event,
                )
        self._buffer = [*buffered, new]

    def stop_buffering(self) -> None:
        """Drop the buffer; later events are not buffered."""
        self._post(self._drop_buffer)

    def _drop_buffer(self) -> None:
        self._buffer = None
