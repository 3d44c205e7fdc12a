"""Generate on the trainer's devices, too, while the trainer waits for responses (`trainer.hybrid_rollout`).

The replicas of a `HybridRouter` are those of the rollout's own processes, followed by the rollouts in the processes
that train. The latter take part between `enter` and `leave`. `HybridScheduler` decides when: only while one batch is
generated, and only while the driver waits for this batch or for a later one. The weights have one version meanwhile.
Before a batch counts as complete, the hybrid replicas have left, and their rollouts sleep.

A request that moves ends with the tokens so far, and `continuation.py` continues it on the other replica. Its random
numbers depend on seed and position, so its tokens are those of a request that stayed.

Used by `AgentLoopManager`, in the driver process.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from hybridrl.errors import HybridRLError
from hybridrl.serving.replicas import GroupReplicas, NotReplaceable, Replicas
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.service import CLOSE_TIMEOUT_S, PolicyService
from hybridrl.workers.rollout.requests import Request, TokenOutput

POLL_S = 0.05  # between two looks at whether the driver waits, and at the loads


class HybridRollout(Protocol):
    """The rollout in the processes that train. Its methods block."""

    group: Any

    def wake_up(self) -> None:
        """Hold the weights that the rollout's own processes hold now."""

    def sleep(self) -> None:
        """Release the memory that training needs."""


class HybridReplicas(GroupReplicas):
    """Workers of the rollout's own group, and after them those of the group that also trains."""

    def __init__(self, own: GroupReplicas, group: Any):
        version, timeout_s, num_peers = own.version, own.progress_timeout_s, own.num_peers
        super().__init__(
            own.group, version=version, progress_timeout_s=timeout_s, resync=own.resync, num_peers=num_peers
        )
        self._hybrid = GroupReplicas(group, version=version, progress_timeout_s=timeout_s, num_peers=num_peers)
        self.hybrid = range(self.num_replicas, self.num_replicas + self._hybrid.num_replicas)
        self.num_replicas += self._hybrid.num_replicas

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        if replica not in self.hybrid:
            return super().serve(replica, requests, aborted)
        self._hybrid.version = self.version
        return self._hybrid.serve(replica - self.hybrid.start, requests, aborted)

    def respawn(self, replica: int) -> None:
        if replica in self.hybrid:
            raise NotReplaceable(f"replica {replica} also trains; the trainer restarts it, not the router")
        super().respawn(replica)


class HybridRouter(ReplicaRouter):
    """A router some of whose replicas take part only between `enter` and `leave`.

    Args:
        replicas: All replicas.
        hybrid: Numbers of those that only take part at times.

    Attributes:
        num_tokens: Tokens that all replicas returned so far, and those of the hybrid ones.
    """

    def __init__(self, replicas: Replicas, *, hybrid: range):
        super().__init__(replicas)
        self.hybrid, self.num_tokens = hybrid, (0, 0)
        self._away = set(self.hybrid)
        self._moving: set[str] = set()
        for replica in self.hybrid:
            self.table.exclude(replica)

    @property
    def can_share(self) -> bool:
        """Whether some replica has several open requests."""
        return any(self.table.load(replica) > 1 for replica in self.table.healthy)

    def enter(self) -> None:
        """Route to the hybrid replicas, too, and move their share of the open requests to them."""
        for replica in self.hybrid:
            self._away.discard(replica)
            self.table.mark_healthy(replica)
            self._pumps[replica] = asyncio.create_task(self._pump(replica))
        unassigned, self._unassigned = self._unassigned, []
        for name in unassigned:
            self._assign(name)
        self._move_requests()

    def balance(self) -> None:
        """Move requests to a replica that has none, from those with several."""
        self._moving &= self._pending.keys()
        if not self._moving and any(self.table.load(replica) == 0 for replica in self.table.healthy):
            self._move_requests()

    def _move_requests(self) -> None:
        for name, replica in self.table.moves():
            self.table.move_conversation(self._pending[name].conversation, replica)
            self._moving.add(name)
            self._interrupt(name)

    def _interrupt(self, name: str) -> None:
        """End a request with the tokens so far; its caller continues it."""
        self._pending[name].paused = True
        self.abort(name)

    async def leave(self) -> None:
        """Continue the hybrid replicas' requests elsewhere; return when they have no call in flight."""
        for replica in self.hybrid:
            self.table.exclude(replica)
            self._away.add(replica)
            for name in self.table.open_on(replica):
                self._interrupt(name)
            self._queues[replica].has_news.set()
        await asyncio.gather(*(self._pumps[replica] for replica in self.hybrid))

    def fail(self, error: BaseException) -> None:
        """End all requests, now and later, with this error."""
        self._fail_all(error)

    async def _serve(self, replica: int) -> list[TokenOutput]:
        outputs = await super()._serve(replica)
        count = sum(len(output.token_ids) for output in outputs)
        total, hybrid = self.num_tokens
        self.num_tokens = total + count, hybrid + (count if replica in self.hybrid else 0)
        return outputs

    async def _replace(self, replica: int, error: Exception, *, last_ok_at: float) -> bool:
        if replica not in self.hybrid:
            return await super()._replace(replica, error, last_ok_at=last_ok_at)
        self._fail_all(error)  # the trainer has lost a process, too: it rewinds, and generates these responses again
        return False


@dataclass
class _Usage:
    """What the driver waited for a batch in seconds; tokens generated meanwhile, all and by the hybrid rollout."""

    waited_s: float = 0.0
    num_tokens: int = 0
    num_hybrid: int = 0


class HybridScheduler:
    """Lets a hybrid rollout take part in the items of a `WorkQueue` that the driver waits for.

    Joining costs time. So it begins after the driver has waited as long as the last join and leave took together: a
    wait that is too short for it gets no longer, and any other at most twice as long.

    Args:
        replicas: The rollout's own processes.
        rollout: The rollout in the processes that train. It is put to sleep.

    Attributes:
        service: The service of all replicas.
    """

    def __init__(self, replicas: GroupReplicas, rollout: HybridRollout):
        everywhere = HybridReplicas(replicas, rollout.group)
        self._router, self._rollout = HybridRouter(everywhere, hybrid=everywhere.hybrid), rollout
        self._awaited, self._waiting_since, self._cost_s = 0, 0.0, 0.0
        self._usage: WeakKeyDictionary[Any, _Usage] = WeakKeyDictionary()
        self._is_awake = False
        rollout.sleep()
        self.service = PolicyService(everywhere, self._router)

    @contextlib.contextmanager
    def waiting(self, number: int, batch: object) -> Iterator[None]:
        """Within the block, the driver waits for this item."""
        self._waiting_since, self._awaited = time.monotonic(), max(self._awaited, number)
        yield
        self._usage.setdefault(batch, _Usage()).waited_s += time.monotonic() - self._waiting_since

    def metrics(self, batch: object) -> dict[str, float]:
        """Return the seconds that the driver waited for a batch, and the share of tokens of the hybrid rollout."""
        usage = self._usage.get(batch, _Usage())
        share = usage.num_hybrid / max(1, usage.num_tokens)
        return {"async/wait_s": usage.waited_s, "async/hybrid_token_share": share}

    @contextlib.contextmanager
    def during(self, number: int, batch: object) -> Iterator[None]:
        """Let the rollout take part in the item within the block while the driver waits for it. It sleeps afterwards.

        Raises:
            WorkerLost: A process of the hybrid rollout was lost.
        """
        done, usage = asyncio.Event(), self._usage.setdefault(batch, _Usage())
        num_tokens, num_hybrid = self._router.num_tokens
        work = self.service.submit(self._take_part(number, done))
        try:
            yield
        except BaseException:
            self.service.notify(done.set)
            with contextlib.suppress(Exception):  # the item's error comes first
                work.result(CLOSE_TIMEOUT_S)  # a service that is closed at this moment may never answer
            raise
        self.service.notify(done.set)
        work.result()
        usage.num_tokens += self._router.num_tokens[0] - num_tokens
        usage.num_hybrid += self._router.num_tokens[1] - num_hybrid

    async def _take_part(self, number: int, done: asyncio.Event) -> None:
        joined = False
        try:
            while not await _is_set_within(done, POLL_S):
                if joined:
                    self._router.balance()
                elif self._is_worthwhile(number):
                    await self._join()
                    joined = True
        except Exception as error:
            self._router.fail(error)
            raise
        if joined:
            await self._leave()

    def _is_worthwhile(self, number: int) -> bool:
        waited_s = time.monotonic() - self._waiting_since
        return number <= self._awaited and waited_s >= self._cost_s and self._router.can_share

    async def _join(self) -> None:
        start = time.monotonic()
        self._is_awake = True
        await asyncio.to_thread(self._rollout.wake_up)
        self._router.enter()
        self._cost_s = time.monotonic() - start

    async def _leave(self) -> None:
        start = time.monotonic()
        await self._router.leave()
        await asyncio.to_thread(self._sleep)
        self._cost_s += time.monotonic() - start

    def _sleep(self) -> None:
        self._rollout.sleep()
        self._is_awake = False

    def close(self) -> None:
        """Put the rollout to sleep after an item was cancelled. Processes that were lost are skipped."""
        if self._is_awake:
            with contextlib.suppress(HybridRLError):
                self._sleep()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
