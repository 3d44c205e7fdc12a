"""`PolicyService`: the router of a job, on an event loop in a thread of its own, from the first push of weights to the
job's end.

The job's own thread decides when there are weights to generate with: between `hold()` and `release(version)` no replica
is asked anything, so its process can take new weights, or train. Requests of whoever else wants to talk to the policy
(`endpoint`) wait then.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from hybridrl.serving.router import GroupReplicas, Router

T = TypeVar("T")

END_TIMEOUT_S = 10.0  # what may still be cancelled and closed when the job is over


class PolicyService:
    """Held at first. Its methods are for other threads than its own.

    at_end: coroutine functions that `close` calls first.
    """

    def __init__(self, replicas: GroupReplicas):
        self.replicas = replicas
        self.router = Router(replicas)
        self.at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy-service", daemon=True)
        self._thread.start()
        self._held = False
        self.call(self.router.__aenter__())
        self.hold()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine beside the router."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine beside the router and return its result; if the caller is interrupted, so is
        the coroutine.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def hold(self) -> None:
        """Return when no replica is asked anything any more; what was open has ended with what there was
        (`Router.pause`).
        """
        if not self._held:
            self.call(self.router.pause())
            self._held = True

    def release(self, version: int | None) -> None:
        """Let replicas be asked again. version: of the weights that they must hold from now on."""
        self.replicas.version = version
        if self._held:
            self._held = False
            self.call(self._resume())

    async def _resume(self) -> None:
        self.router.resume()

    def close(self, *, wait: bool = False) -> None:
        """End everything that runs here. wait: for what replicas are doing, because others will ask their processes; as
        long as the calls' deadlines allow. Without it they are not waited for: their processes are about to end, too.
        """
        if not self._thread.is_alive():
            return
        try:
            self.submit(self._end(wait=wait)).result(None if wait else END_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_TIMEOUT_S)

    async def _end(self, *, wait: bool) -> None:
        for end in self.at_end:
            await end()
        await self.router.leave(wait=wait)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
