"""What a call passes around instead of values: `References` to answers, and futures among arguments.

Methods that are `async def`, called by code that is not. One event loop per process, on a thread of its own.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hybridrl.protocol import DataProtoFuture


class References(list):
    """What stands for the answers of a call that did not wait, one per worker, in worker order.

    ranks: whose answers they are. fetch: values of a list of these references; waits, raises what the workers raised.
    sizes: rows behind each reference, as numbers or as references that `fetch` resolves; None where answers are no
    batches.
    """

    def __init__(
        self, items: Iterable, *, ranks: Sequence[int], fetch: Callable[[list], list], sizes: Sequence | None = None
    ):
        super().__init__(items)
        self.ranks, self.fetch, self.sizes = list(ranks), fetch, None if sizes is None else list(sizes)

    def pick(self, positions: Sequence[int]) -> "References":
        """Return the references at these positions, in this order."""
        sizes = None if self.sizes is None else [self.sizes[i] for i in positions]
        return References(
            [self[i] for i in positions], ranks=[self.ranks[i] for i in positions], fetch=self.fetch, sizes=sizes
        )


def materialize(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return arguments with every `DataProtoFuture` among them replaced by its batch."""
    return tuple(map(_batch_of, args)), {name: _batch_of(value) for name, value in kwargs.items()}


def _batch_of(argument: Any) -> Any:
    return argument.get() if isinstance(argument, DataProtoFuture) else argument


_STARTING = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def finish(value: Any) -> Any:
    """Return a value as it is, and a coroutine's result once it has run; several threads' coroutines
    run side by side.
    """
    return asyncio.run_coroutine_threadsafe(value, _running_loop()).result() if inspect.iscoroutine(value) else value


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _STARTING:  # what coroutines share (a lock, a queue) belongs to one loop
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="coroutines", daemon=True).start()
    return _loop
