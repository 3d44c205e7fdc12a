"""Daemon threads for stages that run concurrently.

`Composition` makes them. Daemon threads do not keep a failed program alive when a stage hangs.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

Calls = queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None]  # None ends a thread


class StageThreads:
    """Runs at most `num_threads` calls at once, in submission order.

    Threads start when they are first needed.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._calls: Calls = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished: set[Future] = set()

    def submit(self, call: Callable[[], Any]) -> Future:
        """Return the future of `call()`."""
        future: Future = Future()
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._calls.put((future, call))
        if len(self._unfinished) > len(self._threads) < self._num_threads:
            thread = threading.Thread(
                target=_run_calls, args=(self._calls,), name=f"stage-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return future

    def wait(self, timeout_s: float) -> int:
        """Wait for all calls; return how many had not ended after `timeout_s` seconds."""
        return len(wait(tuple(self._unfinished), timeout_s).not_done)

    def stop(self, timeout_s: float) -> int:
        """Cancel calls that have not started, let the threads end, and `wait`.

        Calls that are submitted afterwards run in new threads.
        """
        for future in tuple(self._unfinished):
            future.cancel()
        for _ in self._threads:
            self._calls.put(None)
        self._threads, self._calls = [], queue.SimpleQueue()
        return self.wait(timeout_s)


def _run_calls(calls: Calls) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        item = result = None  # do not keep a stage's arguments and result alive
        del future, call


def first_failure(futures: Iterable[Future]) -> BaseException | None:
    """Wait until all have ended or one has failed; return its exception, or None."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = [future.exception() for future in done if not future.cancelled() and future.exception() is not None]
    return failed[0] if failed else None
