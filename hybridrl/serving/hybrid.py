"""Generate on the trainer's devices, too, while the trainer waits for responses (`trainer.hybrid_rollout`).

The router's replicas are those of the rollout's own processes, followed by the rollouts in the processes that train.
The latter are away until they join. `HybridScheduler` decides when they do: only while a batch is generated, and only
while the driver waits. The weights have one version meanwhile. Before a batch counts as complete, the hybrid replicas
have left, and their rollouts sleep.

A request that moves ends with the tokens so far, and its caller continues it on the other replica. Its random numbers
depend on seed and position, so its tokens are those of a request that stayed.

Used by `PolicyService`, in the driver process, on the router's event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from hybridrl.errors import HybridRLError
from hybridrl.serving.router import ReplicaRouter

POLL_S = 0.05  # between two looks at whether the driver waits, and at the loads
LEAVE_TIMEOUT_S = 10.0  # after a batch that failed; a service that is closed at this moment may never answer


class HybridRollout(Protocol):
    """The rollout in the processes that train. Its methods block."""

    group: Any

    def wake_up(self) -> None:
        """Hold the weights that the rollout's own processes hold now."""

    def sleep(self) -> None:
        """Release the memory that training needs."""


@dataclass
class Usage:
    """What the driver waited for a batch in seconds; tokens generated meanwhile, all and by the hybrid rollout."""

    waited_s: float = 0.0
    num_tokens: int = 0
    num_hybrid: int = 0

    def metrics(self) -> dict[str, float]:
        share = self.num_hybrid / max(1, self.num_tokens)
        return {"async/wait_s": self.waited_s, "async/hybrid_token_share": share}


class HybridScheduler:
    """Lets a hybrid rollout take part in the batches that the driver waits for.

    Joining costs time. So it begins after the driver has waited as long as the last join and leave took together: a
    wait that is too short for it gets no longer, and any other at most twice as long.

    Args:
        router: Of all replicas, those of the hybrid rollout included.
        rollout: The rollout in the processes that train. It is put to sleep.
        threads: Its methods are called here.
    """

    def __init__(self, router: ReplicaRouter, rollout: HybridRollout, threads: Executor):
        self._router, self._rollout, self._threads = router, rollout, threads
        self._waiting_since: float | None = None  # None: the driver does not wait
        self._cost_s = 0.0
        self._is_awake = False
        rollout.sleep()

    @contextlib.contextmanager
    def waiting(self, usage: Usage) -> Iterator[None]:
        """Within the block, the driver waits for a batch. Called in the driver's thread."""
        self._waiting_since = start = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None
            usage.waited_s += time.monotonic() - start

    @contextlib.asynccontextmanager
    async def taking_part(self, usage: Usage) -> AsyncIterator[None]:
        """Let the rollout take part in the block, which generates a batch. It sleeps afterwards.

        Raises:
            WorkerLost: A process of the hybrid rollout was lost.
        """
        is_over, before = asyncio.Event(), list(self._router.num_tokens)
        taking_part = asyncio.create_task(self._take_part(is_over))
        try:
            yield
        except BaseException:
            is_over.set()
            await asyncio.wait([taking_part], timeout=LEAVE_TIMEOUT_S)  # the batch's error comes first
            raise
        is_over.set()
        await taking_part
        counts = [now - then for now, then in zip(self._router.num_tokens, before, strict=True)]
        usage.num_tokens += sum(counts)
        usage.num_hybrid += sum(counts[replica] for replica in self._router.hybrid)

    async def _take_part(self, is_over: asyncio.Event) -> None:
        """Join and leave while a batch is generated.

        Consumes: Nothing; it looks at how long the driver has waited, and at the loads of replicas.
        Waits for: The end of the batch, looking every `POLL_S` seconds; a join or leave that it has begun.
        Unblocked by: `taking_part` at the end of the batch.
        """
        joined = False
        try:
            while not await _is_set_within(is_over, POLL_S):
                if joined:
                    self._router.balance()
                elif self._is_worthwhile():
                    await self._join()
                    joined = True
        except Exception as error:
            self._router.fail(error)
            raise
        if joined:
            await self._leave()

    def _is_worthwhile(self) -> bool:
        since, table = self._waiting_since, self._router.table
        can_share = any(table.load(replica) > 1 for replica in table.serving)
        return since is not None and time.monotonic() - since >= self._cost_s and can_share

    async def _join(self) -> None:
        start = time.monotonic()
        self._is_awake = True
        await self._in_thread(self._rollout.wake_up)
        self._router.add_hybrid()
        self._cost_s = time.monotonic() - start

    async def _leave(self) -> None:
        start = time.monotonic()
        await self._router.remove_hybrid()
        await self._in_thread(self._sleep)
        self._cost_s += time.monotonic() - start

    async def _in_thread(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _sleep(self) -> None:
        self._rollout.sleep()
        self._is_awake = False

    def close(self) -> None:
        """Put the rollout to sleep after a batch was cancelled. Processes that were lost are skipped."""
        if self._is_awake:
            with contextlib.suppress(HybridRLError):
                self._sleep()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
