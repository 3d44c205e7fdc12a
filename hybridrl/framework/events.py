"""Named local events. Listeners run in the caller's thread, in order of registration, before `emit` returns."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

Listener = Callable[..., Any]


class Events:
    """Who listens to what. A listener's exception ends the `emit` and reaches its caller."""

    def __init__(self) -> None:
        self._listeners: defaultdict[str, list[tuple[Listener, bool]]] = defaultdict(list)  # (listener, only once)

    def on(self, event: str, fn: Listener) -> None:
        """Call `fn` at every `emit(event)`."""
        self._listeners[event].append((fn, False))

    def once(self, event: str, fn: Listener) -> None:
        """Call `fn` at the next `emit(event)` only."""
        self._listeners[event].append((fn, True))

    def off(self, event: str, fn: Listener | None = None) -> None:
        """Forget `fn`, however it was registered, or every listener of `event`."""
        self._listeners[event] = [entry for entry in self._listeners[event] if fn is not None and entry[0] != fn]

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the listeners that `event` has now; those they add hear only the next one."""
        listeners = self._listeners[event]
        # Taken off first, so that a listener that emits the event again does not hear itself.
        self._listeners[event] = [entry for entry in listeners if not entry[1]]
        for fn, _ in listeners:
            fn(*args, **kwargs)
