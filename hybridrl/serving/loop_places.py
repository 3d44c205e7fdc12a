"""`LoopPlaces`: how many tasks of an event loop may do the same at the same time.

Used by agent loops, tools and environments. A semaphore belongs to one event loop and keeps it alive once a task has
waited for it. Several event loops live one after the other in a process, so a semaphore here lives only while it is in
use.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial


@dataclass
class _Semaphore:
    places: asyncio.Semaphore
    num_users: int = 0  # tasks that have a place or wait for one


@dataclass(eq=False)
class Place:
    """One place that a task has.

    Attributes:
        release: Gives it back. Called once, on the event loop of the task.
    """

    release: Callable[[], None]


class LoopPlaces:
    """Places for tasks, counted for each event loop and each kind of work."""

    def __init__(self) -> None:
        self._semaphores: dict[tuple[asyncio.AbstractEventLoop, Hashable], _Semaphore] = {}

    async def acquire(self, limit: int, *, of: Hashable = None) -> Place:
        """Wait for one of `limit` places of the running event loop, and return it.

        Args:
            limit: The same for every task of a kind.
            of: Kind of work.
        """
        key = (asyncio.get_running_loop(), of)
        semaphore = self._semaphores.setdefault(key, _Semaphore(asyncio.Semaphore(limit)))
        semaphore.num_users += 1
        try:
            await semaphore.places.acquire()
        except BaseException:
            self._leave(key)
            raise
        return Place(partial(self._release, key))

    @asynccontextmanager
    async def take(self, limit: int, *, of: Hashable = None) -> AsyncIterator[None]:
        """Have a place, as `acquire` returns it, for a block."""
        place = await self.acquire(limit, of=of)
        try:
            yield
        finally:
            place.release()

    def _release(self, key: tuple[asyncio.AbstractEventLoop, Hashable]) -> None:
        self._semaphores[key].places.release()
        self._leave(key)

    def _leave(self, key: tuple[asyncio.AbstractEventLoop, Hashable]) -> None:
        semaphore = self._semaphores[key]
        semaphore.num_users -= 1
        if not semaphore.num_users:
            del self._semaphores[key]
