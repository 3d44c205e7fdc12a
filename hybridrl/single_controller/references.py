"""Arguments that a call passes instead of values: `OutputRefs` for results, and futures and coroutines, resolved here.

Used by worker groups in the driver and by `WorkerHost` in worker processes.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hybridrl.data_plane.futures import DataProtoFuture
from hybridrl.single_controller.monitoring.process import PROCESS


class OutputRefs(list[Any]):
    """References to the results of a call that did not wait, one per worker, in worker order.

    Args:
        ranks: rank behind each reference.
        fetch: returns the values of a list of these references; waits, and raises what the workers raised.
        sizes: rows behind each reference, as numbers or as references that `fetch` resolves. None where the results
            are not batches.
    """

    def __init__(
        self,
        items: Iterable[Any],
        *,
        ranks: Sequence[int],
        fetch: Callable[[list[Any]], list[Any]],
        sizes: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(items)
        self.ranks, self.fetch, self.sizes = list(ranks), fetch, None if sizes is None else list(sizes)

    def select(self, positions: Sequence[int]) -> "OutputRefs":
        """Return the references at these positions, in this order."""
        sizes = None if self.sizes is None else [self.sizes[i] for i in positions]
        return OutputRefs(
            [self[i] for i in positions], ranks=[self.ranks[i] for i in positions], fetch=self.fetch, sizes=sizes
        )


def materialize(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with every `DataProtoFuture` among them replaced by its batch."""
    return tuple(map(_fetched, args)), {name: _fetched(value) for name, value in kwargs.items()}


def _fetched(argument: Any) -> Any:
    return argument.get() if isinstance(argument, DataProtoFuture) else argument


def resolve_awaitable(value: Any) -> Any:
    """Return a coroutine's result, and any other value unchanged.

    Coroutines of several threads run concurrently, on the event loop of this process.
    """
    return asyncio.run_coroutine_threadsafe(value, _event_loop()).result() if inspect.iscoroutine(value) else value


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the one event loop of this process, on a thread of its own.

    One loop, because a lock or queue that coroutines share belongs to one loop.
    """
    with PROCESS.lock:
        if (loop := PROCESS.event_loop) is None:
            loop = PROCESS.event_loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop
