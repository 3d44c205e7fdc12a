"""Methods that are `async def`, called by code that is not. One event loop per process, on a thread of its own."""

import asyncio
import inspect
import threading
from typing import Any

_STARTING = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def finish(value: Any) -> Any:
    """Return a value as it is, and a coroutine's result once it has run; several threads' coroutines run side by side."""
    return asyncio.run_coroutine_threadsafe(value, _running_loop()).result() if inspect.iscoroutine(value) else value


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _STARTING:  # what coroutines share (a lock, a queue) belongs to one loop
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="coroutines", daemon=True).start()
    return _loop
