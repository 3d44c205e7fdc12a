"""`SubmittedCall`: a call of a worker group that runs while the driver does something else.

A stage with `submits=True` makes it in its first half, yields it, and reads its result in its second half. It consumes
the rows that it sends. Its workers answer it, and nothing else unblocks `get`, but for the call's deadline and the loss
of a worker.
"""

import time
from collections.abc import Callable, Generator
from typing import Any, Self

from hybridrl.data_plane.futures import DataProtoFuture


class SubmittedCall:
    """The call, and when its workers had it; see `framework.wrapper.TimedWork`.

    Args:
        group: The worker group.
        submit: Makes the call, or several ones, without waiting.
        after: The call that the same processes got before: they work on one at a time.

    Attributes:
        begin: When the workers could begin with it, `time.perf_counter()`; known after `get`.
    """

    def __init__(self, group: Any, submit: Callable[[], list[DataProtoFuture]], *, after: Self | None = None) -> None:
        self._futures, self._after, self._answered = submit(), after, list[float]()
        self.begin = time.perf_counter()
        for rows in group.as_futures([size for future in self._futures for size in future.sizes or ()]):
            rows.add_done_callback(lambda _: self._answered.append(time.perf_counter()))

    def get(self) -> list[Any]:
        """Wait for the results and return them, once."""
        results = [future.get() for future in self._futures]
        if self._after is not None:
            self.begin = max(self.begin, self._after.end)
        self._futures, self._after = [], None  # hold neither batches nor earlier calls
        return results

    @property
    def end(self) -> float:
        """When all workers had answered, as far as is known."""
        return max([self.begin, *self._answered])


Submitting = Generator[SubmittedCall, None, Any]  # what a stage with `submits=True` returns
