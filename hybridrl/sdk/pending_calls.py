"""`PENDING`: the calls of this process that have not ended, and the few threads that end them.

A call is watched from its start. When all outputs are there, or the first of them failed, or its process was lost, or
its deadline has passed, one of `MAX_THREADS` threads resolves it: it reads the outputs and sets the call's future. So
the number of threads does not grow with the number of pending calls. Resolving never waits for another pending call,
but callbacks of a future may. A thread that waits in one therefore resolves other calls meanwhile.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MAX_THREADS = 8
CHECK_PERIOD_S = 0.1  # of deadlines, and of processes that the master has reported as lost


@dataclass(eq=False)
class PendingCall:
    """A call that has been sent.

    Attributes:
        outputs: One future per process.
        deadline: As `time.monotonic()` counts; None for no limit.
        is_lost: Returns whether a process that has not answered was lost.
        resolve: Reads the outputs. Called once, in a thread of `PENDING`.
        num_missing: Outputs that are not there yet.
    """

    outputs: Sequence["Future[Any]"]
    deadline: float | None
    is_lost: Callable[[], bool]
    resolve: Callable[[], None]
    num_missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_missing = len(self.outputs)


class PendingCalls:
    """The watched calls of a process.

    Its threads start with the first call, and end with the process.
    """

    def __init__(self) -> None:
        self._watched: set[PendingCall] = set()
        self._changed = threading.Condition()
        self._ready: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []  # that resolve calls
        self._timer: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, call: PendingCall) -> None:
        """Watch a call until it can be resolved."""
        with self._changed:
            self._watched.add(call)
            if self._timer is None:
                self._timer = self._start("pending-calls", self._check_all)
            self._changed.notify_all()
        for output in call.outputs:
            output.add_done_callback(lambda output: self._on_output(call, output))

    def work(self, timeout_s: float) -> bool:
        """Resolve one call, if the current thread is one that resolves calls; return whether it is."""
        if threading.current_thread() not in self._threads:
            return False
        with suppress(queue.Empty):
            self._ready.get(timeout=timeout_s)()
        return True

    def _on_output(self, call: PendingCall, output: "Future[Any]") -> None:
        """Called in a thread of Ray, which must not wait."""
        with self._changed:
            call.num_missing -= 1
            decided = call.num_missing == 0 or output.exception() is not None
        if decided:
            self._release(call)

    def _release(self, call: PendingCall) -> None:
        """Have a thread resolve a call, unless one does already."""
        with self._changed:
            if call not in self._watched:
                return
            self._watched.discard(call)
            if len(self._threads) < MAX_THREADS:
                self._threads.append(self._start(f"resolves-calls-{len(self._threads)}", self._resolve_all))
        self._ready.put(call.resolve)

    def _resolve_all(self) -> None:
        while True:
            self._ready.get()()

    def _check_all(self) -> None:
        """Release the calls whose deadline has passed, or whose process was lost."""
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                calls = list(self._watched)
            now = time.monotonic()
            for call in calls:
                if (call.deadline is not None and now >= call.deadline) or call.is_lost():
                    self._release(call)
            time.sleep(CHECK_PERIOD_S)

    @staticmethod
    def _start(name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


PENDING = PendingCalls()
