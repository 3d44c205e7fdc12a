"""Threads of tools: a tool that hangs starves no other one, and does not keep the process from ending.

`tools.call_tool` runs tools here that are no coroutines, on the event loop of the agent loops. Each call has a daemon
thread. Event loops and executors wait for their threads at the end of the process; nothing waits for these.
"""

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from hybridrl.serving.concurrency_limit import slots

MAX_RUNNING = 32  # calls of one tool at the same time; others wait without using up their time
MAX_ABANDONED = 64  # threads of one tool that have not returned in time; then it is not called any more


class ToolHangs(Exception):
    """A tool has not returned too often."""


class ToolExit(Exception):
    """A tool raised SystemExit, KeyboardInterrupt or the like."""

    def __init__(self, error: BaseException):
        super().__init__(f"it raised {type(error).__name__}: {error}")


_abandoned: Counter[Callable] = Counter()
_lock = threading.Lock()


async def call_in_thread(
    function: Callable, arguments: dict[str, Any], *, timeout_s: float | None = None, has_slot: bool = False
) -> Any:
    """Return what the function returns.

    Args:
        function: Any callable.
        arguments: Its keyword arguments.
        timeout_s: Seconds for the call, from when it begins. Its thread goes on after that. None: the caller limits it.
        has_slot: The caller limits how many calls there are at the same time.

    Raises:
        TimeoutError: It has not returned in time.
        ToolHangs: `MAX_ABANDONED` earlier calls have not returned yet.
        ToolExit: It raised SystemExit, KeyboardInterrupt or the like.
        Exception: What else the function raises.
    """
    async with nullcontext() if has_slot else slots(MAX_RUNNING, of=function):
        if _abandoned[function] >= MAX_ABANDONED:
            raise ToolHangs(f"{MAX_ABANDONED} earlier calls have not returned; it is not called any more")
        call = _Call(function, arguments)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.result
        finally:
            call.abandon()


class _Call:
    """One call in a daemon thread of its own; `result` is a future of the running event loop."""

    def __init__(self, function: Callable, arguments: dict[str, Any]):
        self.function = function
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._has_returned = self._is_abandoned = False
        run = partial(contextvars.copy_context().run, function, **arguments)
        name = f"tool {getattr(function, '__name__', function)}"
        threading.Thread(target=self._run, args=(run,), name=name, daemon=True).start()

    def abandon(self) -> None:
        """Count a thread that has not returned."""
        with _lock:
            self._is_abandoned = not self._has_returned
            _abandoned[self.function] += self._is_abandoned

    def _run(self, run: Callable[[], Any]) -> None:
        """Call the function in its thread.

        Consumes: The arguments.
        Waits for: The function, without a deadline: a thread cannot be ended.
        Unblocked by: The function's return or exception.
        """
        value, error = None, None
        try:
            value = run()
        except BaseException as raised:  # also SystemExit: it fails this call only
            error = raised
        with _lock:
            self._has_returned = True
            _abandoned[self.function] -= self._is_abandoned
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._set, value, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        elif isinstance(error, StopIteration):  # a future does not take it
            self.result.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            self.result.set_exception(error if isinstance(error, Exception) else ToolExit(error))
