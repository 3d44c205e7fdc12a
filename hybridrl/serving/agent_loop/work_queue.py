"""Run batches and weight pushes one after the other, in submission order.

Where rollout processes only generate, a thread of the driver runs the items beside training. Where these processes also
train, they have no time for requests in between: each item runs at once while the caller waits. After an item failed,
no further one runs.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from hybridrl.serving.service import PolicyService

Work = Callable[[PolicyService], object]


class Pending(Protocol):
    """Submitted work, for instance a weight push."""

    def wait(self) -> None:
        """Return when it is done. Raises its error."""
        ...


class WorkItem:
    """A submitted batch or push."""

    def __init__(self, done: Future):
        self._done = done

    def wait(self) -> None:
        """Return when it is done. Raises its error, or that of an item before it.

        The timeouts of the calls inside bound the wait.
        """
        self._done.result()


class WorkQueue:
    """Items for one service.

    Args:
        service: Router and event loop.
        concurrent: Run items in a thread, and keep the service open between them.
    """

    def __init__(self, service: PolicyService, *, concurrent: bool):
        self.service = service
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="work-queue") if concurrent else None
        self._failure: BaseException | None = None

    def generate(self, version: int | None, work: Work) -> WorkItem:
        """Submit `work`, to run while the service is open with weights of this version."""
        return self._run(lambda: self._generate(version, work))

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

    def _run(self, item: Callable[[], None]) -> WorkItem:
        if self._threads is not None:
            return WorkItem(self._threads.submit(self._run_unless_failed, item))
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
