"""`ConcurrencyLimit`: a semaphore per event loop and kind of work, dropped when unused.

Used by agent loops, tools and environments. A semaphore belongs to one event loop and keeps it alive once a task has
waited for it. Several event loops live one after the other in a process, so a semaphore here lives only while it is in
use.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

Release = Callable[[], None]  # gives a slot back; called once, on the event loop of the task that has it


@dataclass
class _Semaphore:
    slots: asyncio.Semaphore
    num_users: int = 0  # tasks that have a slot or wait for one


class ConcurrencyLimit:
    """Slots for tasks, counted for each event loop and each kind of work."""

    def __init__(self) -> None:
        self._semaphores: dict[tuple[asyncio.AbstractEventLoop, Hashable], _Semaphore] = {}

    async def acquire(self, limit: int, *, of: Hashable = None) -> Release:
        """Wait for one of `limit` slots of the running event loop, and return what gives it back.

        Args:
            limit: The same for every task of a kind.
            of: Kind of work.
        """
        key = (asyncio.get_running_loop(), of)
        semaphore = self._semaphores.setdefault(key, _Semaphore(asyncio.Semaphore(limit)))
        semaphore.num_users += 1
        try:
            await semaphore.slots.acquire()
        except BaseException:
            self._leave(key)
            raise
        return partial(self._release, key)

    @asynccontextmanager
    async def take(self, limit: int, *, of: Hashable = None) -> AsyncIterator[None]:
        """Have a slot, as `acquire` returns it, for a block."""
        release = await self.acquire(limit, of=of)
        try:
            yield
        finally:
            release()

    def _release(self, key: tuple[asyncio.AbstractEventLoop, Hashable]) -> None:
        self._semaphores[key].slots.release()
        self._leave(key)

    def _leave(self, key: tuple[asyncio.AbstractEventLoop, Hashable]) -> None:
        semaphore = self._semaphores[key]
        semaphore.num_users -= 1
        if not semaphore.num_users:
            del self._semaphores[key]
