"""Run a job's router on an event loop in its own thread of the driver process, with batches and pushes in order.

`PolicyService` lives from the start of the rollout until the job ends. The trainer's thread submits batches and weight
pushes. Where rollout processes only generate, they run on the event loop beside training, one after the other. Where
these processes also train, a batch runs while the trainer waits, and the router is paused in between. Requests of other
clients (the OpenAI endpoint) are served whenever the router is not paused.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hybridrl.serving.replicas import GroupReplicas
from hybridrl.serving.router import ReplicaRouter

T = TypeVar("T")
Generate = Callable[[ReplicaRouter], Coroutine[Any, Any, None]]

CLOSE_TIMEOUT_S = 10.0  # to cancel and close everything at the end of a job


class PendingLoad(Protocol):
    """Weights that processes are receiving."""

    def wait(self) -> None:
        """Return when it is done. Raises its error."""
        ...


@dataclass(frozen=True)
class QueuedWork:
    """A batch or push in the service's order."""

    done: "Future[None]"

    def wait(self) -> None:
        """Return when it is done. Raises its error, or that of what came before it."""
        self.done.result()


class PolicyService:
    """Router and event loop of a job. Call its methods from other threads, those that are no coroutines.

    The thread of the event loop:
        Consumes: Coroutines of other threads (`call`, `submit`).
        Waits for: Whatever any of its coroutines waits for.
        Unblocked by: A submitted coroutine; the threads and sockets of its coroutines; `close`, which ends it.

    Args:
        replicas: The rollout's processes.
        concurrent: They only generate, so batches run beside training.

    `on_close`: coroutine functions that `close` runs first.
    """

    def __init__(self, replicas: GroupReplicas, *, concurrent: bool):
        self.replicas, self._concurrent = replicas, concurrent
        self.router = ReplicaRouter(replicas)
        self.on_close: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._turn = asyncio.Lock()  # of a batch or push; waiting ones get it in the order of their submission
        self._failure: BaseException | None = None  # of a batch or push: no later one runs
        self._blocking = ThreadPoolExecutor(1, thread_name_prefix="push")  # apart from threads that agents may fill
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy-service", daemon=True)
        self._thread.start()

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

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine on the router's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def generate(self, version: int | None, generate: Generate) -> QueuedWork:
        """Generate a batch with weights of this version: after everything submitted before, or at once.

        Args:
            version: Of the last push.
            generate: Generates with the router.
        """
        if self._concurrent:
            return QueuedWork(self.submit(self._in_turn(lambda: generate(self.router))))
        self.call(self.resume(version))
        try:
            self.call(generate(self.router))
        finally:
            self.call(self.router.pause())
        done: Future[None] = Future()
        done.set_result(None)
        return QueuedWork(done)

    def push(self, version: int, receive: Callable[[], PendingLoad]) -> PendingLoad:
        """Let the processes receive weights of this version, after everything submitted before.

        Args:
            version: Version of the weights.
            receive: Starts the rollout's half of the push.
        """
        if not self._concurrent:  # the router is paused already
            return receive()
        return QueuedWork(self.submit(self._in_turn(lambda: self._push(version, lambda: receive().wait()))))

    async def _in_turn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a batch or push.

        Consumes: What was submitted, in this order.
        Waits for: The batches and pushes before it.
        Unblocked by: Their end or failure, and `close`, which cancels it.
        """
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            try:
                await work()
            except BaseException as error:
                self._failure = error
                raise

    async def _push(self, version: int, load: Callable[[], None]) -> None:
        await self.router.pause()
        await asyncio.get_running_loop().run_in_executor(self._blocking, load)
        await self.resume(version)

    async def resume(self, version: int | None) -> None:
        """Let the router call replicas again. version: of the weights that they must hold from now on."""
        self.replicas.version = version
        self.router.resume()

    def close(self, *, wait: bool = False) -> None:
        """Stop the router, its clients and the thread. Batches and pushes that have not ended are cancelled.

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
        self._blocking.shutdown(wait=wait, cancel_futures=True)

    async def _close(self, *, wait: bool) -> None:
        for close_part in self.on_close:
            await close_part()
        await self.router.close(wait=wait)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
