"""`FutureSequence`: the outputs of a call that was split over the processes of a role, as one sequence.

Its length is known when the call starts. Reading an element waits for the process that computes it, and no other.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any, TypeVar, overload

T = TypeVar("T")
__all__ = ["Future", "FutureSequence", "ended"]


def ended(value: T) -> "Future[T]":
    """Return the future of a value that is there."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


class FutureSequence(Sequence[T]):
    """A sequence in consecutive parts, each of which one process computes.

    Reading raises what the process raised.

    Args:
        parts: One future per process; its result is a sequence.
        sizes: Number of elements of each part.
    """

    def __init__(self, parts: Sequence["Future[Sequence[T]]"], sizes: Sequence[int]) -> None:
        self._parts, self._sizes = list(parts), list(sizes)
        self._starts = [0, *accumulate(self._sizes)]  # position of each part's first element, and the length

    @classmethod
    def of(cls, values: Sequence[T]) -> "FutureSequence[T]":
        """Return values that are known already."""
        return cls([ended(values)], [len(values)])

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} of a FutureSequence with {len(self)} elements")
        part = bisect_right(self._starts, position) - 1
        return self._part(part)[position - self._starts[part]]

    def __iter__(self) -> Iterator[T]:
        for number, size in enumerate(self._sizes):
            if size:
                yield from self._part(number)

    def wait(self, timeout: float | None = None) -> list[T]:
        """Wait for all parts and return their elements.

        Raises:
            TimeoutError: Not all are there after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        elements: list[T] = []
        for number in range(len(self._parts)):  # also empty parts, which may have failed
            elements += self._part(number, None if until is None else max(0.0, until - time.monotonic()))
        return elements

    def done(self) -> bool:
        """Return whether all parts are there, or have failed."""
        return all(part.done() for part in self._parts)

    def _part(self, number: int, timeout: float | None = None) -> Sequence[T]:
        part = self._parts[number].result(timeout)
        try:
            size: Any = len(part)
        except TypeError:
            size = f"no sequence but {type(part).__name__}"
        if size != self._sizes[number]:
            raise ValueError(
                f"part {number} of a batch call is {size}, for {self._sizes[number]} elements; the method must return "
                "one output for each of its inputs, in their order"
            )
        return part

    def __reduce__(self) -> Any:
        return list, (self.wait(),)  # sent to another process, it is a list

    def __repr__(self) -> str:
        ready = sum(size for part, size in zip(self._parts, self._sizes, strict=True) if part.done())
        return f"<FutureSequence of {len(self)}, {ready} ready>"
