"""Run a job's router on an event loop in its own thread of the driver process.

`PolicyService` lives from the start of the rollout until the job ends. The trainer's thread decides when replicas may
generate. Between `pause()` and `resume(version)` they get no calls, so that their processes can load weights or train.
Requests of other clients (the OpenAI endpoint) wait in between.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from hybridrl.serving.replicas import GroupReplicas
from hybridrl.serving.router import ReplicaRouter

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0  # to cancel and close everything at the end of a job


class PolicyService:
    """Router and event loop of a job; paused at first. Call its methods from other threads.

    Args:
        replicas: The rollout's processes.
        router: Routes to these replicas; None: a `ReplicaRouter`.

    `on_close`: coroutine functions that `close` runs first.
    """

    def __init__(self, replicas: GroupReplicas, router: ReplicaRouter | None = None):
        self.replicas = replicas
        self.router = router or ReplicaRouter(replicas)
        self.on_close: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy-service", daemon=True)
        self._thread.start()
        self._paused = False
        self.call(self.router.__aenter__())
        self.pause()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine on the router's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def notify(self, callback: Callable[[], None]) -> None:
        """Call this soon on the router's event loop; do not wait."""
        self._loop.call_soon_threadsafe(callback)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the router's event loop and return its result.

        If the caller is interrupted, the coroutine is cancelled.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def pause(self) -> None:
        """Return when no replica has a call in flight; open requests end early (`ReplicaRouter.pause`)."""
        if not self._paused:
            self.call(self.router.pause())
            self._paused = True

    def resume(self, version: int | None) -> None:
        """Let the router call replicas again. version: of the weights that they must hold from now on."""
        self.replicas.version = version
        if self._paused:
            self._paused = False
            self.call(self._resume())

    async def _resume(self) -> None:
        self.router.resume()

    def close(self, *, wait: bool = False) -> None:
        """Stop the router, its clients and the thread.

        Args:
            wait: Wait for the replicas' current calls, up to the calls' timeouts, because others will use their
                processes. False: do not wait, because the processes end, too.
        """
        if not self._thread.is_alive():
            return
        try:
            self.submit(self._close(wait=wait)).result(None if wait else CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)

    async def _close(self, *, wait: bool) -> None:
        for close_part in self.on_close:
            await close_part()
        await self.router.close(wait=wait)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
