"""`EnvironmentPool`: the processes of one environment, started when they are needed and used again.

Runs in the driver process. All agent loops of a process share the pool of an environment (`pool_of`), also on several
event loops. A process that failed is ended; the next episode gets another one.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from hybridrl.errors import AgentFailed, ConfigError, DataError
from hybridrl.serving.agent_loop.episode_clock import EpisodeClock
from hybridrl.serving.concurrency_limit import slots
from hybridrl.serving.environments.process import EnvironmentProcess
from hybridrl.serving.environments.settings import KEY, EnvironmentSpec

logger = logging.getLogger(__name__)

_pools: dict[str, "EnvironmentPool"] = {}
_lock = threading.Lock()


class EnvironmentPool:
    """At most `spec.num_processes` episodes work at the same time on each event loop; others wait for a slot.

    An episode that waits for new weights keeps its process, and gives its slot to another one.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        self._idle: list[EnvironmentProcess] = []
        self._has_worked = False  # whether a process has loaded the class

    @asynccontextmanager
    async def take(self, clock: EpisodeClock) -> AsyncIterator[EnvironmentProcess]:
        """Give one process, for one episode. It is ended if the block raises or is cancelled.

        Consumes: An idle process, or a new one.
        Waits for: A slot; the process to load the environment.
        Unblocked by: An episode that ends, or waits for new weights; the process, or its deadline.
        """
        async with clock.hold(slots(self.spec.num_processes, of=self)):
            process = self._pop() or EnvironmentProcess(self.spec)
            try:
                if not process.loaded:
                    await process.load(has_worked=self._has_worked)
                    self._has_worked = True
                yield process
                await self._give_back(process)
            except BaseException:
                process.end_soon()
                raise

    def check(self) -> None:
        """Start a first process, so that a wrong class is found before the run begins. Does nothing after that.

        Raises:
            ConfigError: The class cannot be loaded or the object not made, or not in time.
        """

        async def start() -> None:
            async with self.take(EpisodeClock()):
                pass

        if self._has_worked:
            return
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
            try:
                thread.submit(asyncio.run, start()).result(self.spec.start_timeout_s + 60)
            except AgentFailed as error:
                raise ConfigError(f"{KEY}: {error}") from error

    def close(self) -> None:
        """End the processes that play no episode."""
        with _lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end_soon()

    def _pop(self) -> EnvironmentProcess | None:
        with _lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                process.end_soon()
        return None

    async def _give_back(self, process: EnvironmentProcess) -> None:
        """Close the episode; a process that fails to do so plays no other one."""
        try:
            await process.close_episode()
        except (AgentFailed, DataError) as error:
            logger.warning("a process of the environment %r is replaced: its `close` failed: %s", self.spec.name, error)
            return process.end_soon()
        with _lock:
            if len(self._idle) < self.spec.num_processes:
                return self._idle.append(process)
        process.end_soon()


def pool_of(spec: EnvironmentSpec) -> EnvironmentPool:
    """Return this process's pool of an environment."""
    with _lock:
        return _pools.setdefault(repr(spec), EnvironmentPool(spec))
