"""`Turns`: batches and pushes of weights one after the other, in the order in which they were asked for.

Where the rollout's processes do nothing but generate, turns are taken in a thread, beside training; else at once, while
the caller waits, because these processes train, too, and have no time for requests in between. After a turn that failed
nobody has another one.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hybridrl.serving.service import PolicyService

Work = Callable[[PolicyService], object]


class Turn:
    """Something that was asked for."""

    def __init__(self, done: Future):
        self._done = done

    def wait(self) -> None:
        """Return when it is done. Raises what went wrong with it, or with one before it.

        How long that takes is bounded by the deadlines of what is done in it.
        """
        self._done.result()

    check = wait  # as of a `Push`


class Turns:
    """beside: turns are taken in a thread of their own, and between them the service stays open to others."""

    def __init__(self, service: PolicyService, *, beside: bool):
        self.service = service
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="turns") if beside else None
        self._failure: BaseException | None = None

    def generate(self, version: int | None, work: Work) -> Turn:
        """Have `work` done while the service is open, with weights of this version."""
        return self._take(lambda: self._generate(version, work))

    def push(self, version: int, take: Callable[[], None]) -> Turn:
        """Have `take` done while the service is held, and open it again, for weights of this version."""
        return self._take(lambda: self._push(version, take))

    def _generate(self, version: int | None, work: Work) -> None:
        if self._threads is not None:
            work(self.service)
            return
        self.service.release(version)
        try:
            work(self.service)
        finally:
            self.service.hold()

    def _push(self, version: int, take: Callable[[], None]) -> None:
        self.service.hold()
        take()
        self.service.release(version)

    def _take(self, turn: Callable[[], None]) -> Turn:
        if self._threads is not None:
            return Turn(self._threads.submit(self._carefully, turn))
        done: Future = Future()
        turn()
        done.set_result(None)
        return Turn(done)

    def _carefully(self, turn: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            turn()
        except BaseException as error:
            self._failure = error
            raise

    def close(self, *, wait: bool = False) -> None:
        """End the service, and with it the turn that is being taken; none of those that wait begins.

        wait: as `PolicyService.close`.
        """
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self.service.close(wait=wait)
        if self._threads is not None:
            self._threads.shutdown(wait=wait)
