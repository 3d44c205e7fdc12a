"""Run batches and weight pushes one after the other, in submission order.

Where rollout processes only generate, a thread of the driver runs the items beside training. Where these processes also
train, they have no time for requests in between: each item runs at once while the caller waits. After an item failed,
no further one runs.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

from hybridrl import serving
from hybridrl.serving.service import PolicyService

Work = Callable[[PolicyService], object]


class Pending(Protocol):
    """Submitted work, for instance a weight push."""

    def wait(self) -> None:
        """Return when it is done. Raises its error."""
        ...


class WorkItem:
    """A submitted batch or push.

    Args:
        done: Its result.
        waiting: Returns a context in which the driver waits for it.
    """

    def __init__(self, done: Future, waiting: Callable[[], AbstractContextManager] = nullcontext):
        self._done, self._waiting = done, waiting

    def wait(self) -> None:
        """Return when it is done. Raises its error, or that of an item before it.

        The timeouts of the calls inside bound the wait.
        """
        with self._waiting():
            self._done.result()


class WorkQueue:
    """Items for one service.

    Args:
        service: Router and event loop.
        concurrent: Run items in a thread, and keep the service open between them.
        hybrid: Lets the trainer's devices generate for items that the driver waits for. None: they only train.
    """

    def __init__(
        self, service: PolicyService, *, concurrent: bool, hybrid: "serving.HybridScheduler | None" = None
    ) -> None:
        self.service, self._hybrid, self._num_batches = service, hybrid, 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="work-queue") if concurrent else None
        self._failure: BaseException | None = None

    def generate(self, version: int | None, work: Work, batch: object) -> WorkItem:
        """Submit `work`, to run while the service is open with weights of this version. It generates for `batch`."""
        if (hybrid := self._hybrid) is None:
            return self._run(lambda: self._generate(version, work))
        self._num_batches += 1
        number = self._num_batches

        def generate() -> None:
            with hybrid.during(number, batch):
                self._generate(version, work)

        return self._run(generate, partial(hybrid.waiting, number, batch))

    def metrics(self, batch: object) -> dict[str, float]:
        """Return the metrics of a batch, see `HybridScheduler.metrics`; nothing without one."""
        return {} if self._hybrid is None else self._hybrid.metrics(batch)

    def push(self, version: int, load: Callable[[], None]) -> WorkItem:
        """Submit `load`, to run while the service is paused; then resume with weights of this version."""
        return self._run(lambda: self._push(version, load))

    def _generate(self, version: int | None, work: Work) -> None:
        if self._threads is not None:
            work(self.service)
            return
        self.service.resume(version)
        try:
            work(self.service)
        finally:
            self.service.pause()

    def _push(self, version: int, load: Callable[[], None]) -> None:
        self.service.pause()
        load()
        self.service.resume(version)

    def _run(self, item: Callable[[], None], waiting: Callable[[], AbstractContextManager] = nullcontext) -> WorkItem:
        if self._threads is not None:
            return WorkItem(self._threads.submit(self._run_unless_failed, item), waiting)
        done: Future = Future()
        item()
        done.set_result(None)
        return WorkItem(done)

    def _run_unless_failed(self, item: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            item()
        except BaseException as error:
            self._failure = error
            raise

    def close(self, *, wait: bool = False) -> None:
        """Close the service, which ends the running item. Waiting items are cancelled.

        Args:
            wait: As for `PolicyService.close`.
        """
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self.service.close(wait=wait)
        if self._threads is not None:
            self._threads.shutdown(wait=wait)
        if self._hybrid is not None and wait:
            self._hybrid.close()
