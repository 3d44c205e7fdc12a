"""`EpisodeClock`: the deadlines and the slot of an episode, which stop while it waits for new weights.

With partial rollouts a request of an episode waits until the next weights are there. `RowClient` stops the clock
meanwhile. Agent loops enter their deadlines and slots here. Each row has a clock of its own, `row["episode_clock"]`.
Runs in the driver process, on the event loop of the agent loops.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any


class EpisodeClock:
    """The time of one episode. It stands still while at least one of its requests waits."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self._running: set[asyncio.Timeout] = set()
        self._left_s: dict[asyncio.Timeout, float] = {}  # of deadlines that stand still
        self._held: list[asyncio.Semaphore] = []

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "EpisodeClock":
        """Return that of a row, or a new one where nothing stops it."""
        return row.get("episode_clock") or cls()

    @asynccontextmanager
    async def limit(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Limit a block, as `asyncio.timeout` does, to seconds in which the episode does not wait."""
        async with asyncio.timeout(None if math.isinf(timeout_s) else timeout_s) as limit:
            self._running.add(limit)
            try:
                yield limit
            finally:
                self._running.discard(limit)
                self._left_s.pop(limit, None)

    @asynccontextmanager
    async def hold(self, slots: asyncio.Semaphore) -> AsyncIterator[None]:
        """Wait for a slot (`concurrency_limit`), and hold it until the block ends or the episode first waits.

        An episode that waits would otherwise keep others from beginning, among them those that it waits for.
        """
        await slots.acquire()
        self._held.append(slots)
        try:
            yield
        finally:
            if slots in self._held:
                self._held.remove(slots)
                slots.release()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock for a block, in which a request of the episode waits for new weights."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._stop()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._start()

    def _stop(self) -> None:
        held, self._held = self._held, []
        for slots in held:
            slots.release()
        now = asyncio.get_running_loop().time()
        for limit in self._running:
            if (until := limit.when()) is not None and not limit.expired():
                self._left_s[limit] = until - now
                limit.reschedule(None)

    def _start(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit, left_s in self._left_s.items():
            limit.reschedule(now + left_s)
        self._left_s = {}
