"""`EpisodeWaits`: an episode that waits for new weights uses up neither its time nor a place of another one.

With partial rollouts a request of an episode waits until the next weights are there. `RowClient` reports that here.
Agent loops enter their deadlines and places here; each row has an object of its own, as `row["waits"]`. Runs in the
driver process, on the event loop of the agent loops.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from hybridrl.serving.loop_places import Place


class EpisodeWaits:
    """The waits of one episode. Deadlines stand still while at least one of its requests waits."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self._running: set[asyncio.Timeout] = set()
        self._left_s: dict[asyncio.Timeout, float] = {}  # of deadlines that stand still
        self._held: list[Place] = []

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "EpisodeWaits":
        """Return those of a row, or new ones where nothing reports waits."""
        return row.get("waits") or cls()

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
    async def hold(self, acquired: Awaitable[Place]) -> AsyncIterator[None]:
        """Wait for a place (`LoopPlaces.acquire`), and hold it until the block ends or the episode first waits.

        An episode that waits would otherwise keep others from beginning, among them those that it waits for.
        """
        place = await acquired
        self._held.append(place)
        try:
            yield
        finally:
            if place in self._held:
                self._held.remove(place)
                place.release()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block in which a request of the episode waits for new weights."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._release_places()
            self._stop_clocks()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._start_clocks()

    def _release_places(self) -> None:
        held, self._held = self._held, []
        for place in held:
            place.release()

    def _stop_clocks(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit in self._running:
            if (until := limit.when()) is not None and not limit.expired():
                self._left_s[limit] = until - now
                limit.reschedule(None)

    def _start_clocks(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit, left_s in self._left_s.items():
            limit.reschedule(now + left_s)
        self._left_s = {}
