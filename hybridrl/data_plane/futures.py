"""`DataProtoFuture`: a batch that is still on the workers, as one reference per shard.

The driver moves references, not tokens: handing a future to a group with as many workers as it has shards passes each
shard on without looking at it. Nothing here knows what a reference is; whoever makes a future says how to `fetch` one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from hybridrl.data_plane.columns import even_bounds
from hybridrl.errors import DataError

CollectFn = Callable[[list], Any]


def concat_shards(shards: list) -> Any:
    """Return the rows of all shards as one batch of the shards' class."""
    return type(shards[0]).concat(shards)


@dataclass
class DataProtoFuture:
    """A promised batch.

    collect_fn: makes the batch of the fetched shards, in shard order; row by row, so that some shards can be collected
    alone. futures: one reference per shard. dispatch_fn: applied to the collected batch before it is returned. fetch:
    values of a list of references, with a deadline of its own; None when the futures are the values themselves. sizes:
    rows of each shard, or a reference to that number; with them a piece leaves alone the shards it does not need. part:
    (i, n) if this is the i-th of n pieces and the sizes were still references when it was cut.

    A future is for passing on or for `get()`. It is picklable if its functions are.
    """

    collect_fn: CollectFn
    futures: list
    dispatch_fn: Callable[[Any], Any] | None = None
    fetch: Callable[[list], list] | None = None
    sizes: list | None = None
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None and len(self.sizes) != len(self.futures):
            raise ValueError(f"sizes={self.sizes} must name the rows of each of the {len(self.futures)} shards")

    @staticmethod
    def concat(
        data: list, *, fetch: Callable[[list], list] | None = None, sizes: list | None = None
    ) -> "DataProtoFuture":
        """Return the future of the concatenation of the batches behind a list of references."""
        return DataProtoFuture(collect_fn=concat_shards, futures=list(data), fetch=fetch, sizes=sizes)

    def get(self) -> Any:
        """Fetch the shards and return the batch.

        Raises what fetching raises, and DataError if the rows are not those promised.
        """
        batch = self._all_shards() if self.part is None else self._own_part()
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)

    def _all_shards(self) -> Any:
        shards = self.fetch(self.futures) if self.fetch else list(self.futures)
        batch = self.collect_fn(shards)
        if self._sizes_are_numbers() and len(batch) != sum(self.sizes):
            raise DataError(f"the shards were promised with {self.sizes} rows and came with {[len(s) for s in shards]}")
        return batch

    def _own_part(self) -> Any:
        index, parts = self.part
        whole = replace(self, sizes=self.fetch(self.sizes), part=None, dispatch_fn=None)
        if not whole._sizes_are_numbers():
            raise DataError(f"what was promised has no rows to be cut by: the shards' sizes are {whole.sizes}")
        return whole.chunk(parts)[index].get()

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Return `chunks` futures of consecutive rows, without fetching anything.

        As many as there are shards: one shard each, whatever its size. Otherwise piece sizes differ by at most one row
        and each piece fetches the shards it needs; without `sizes`, or with a `dispatch_fn` of its own, each fetches
        all of them. Meta information of a piece is that of the shards it fetched.
        """
        if chunks < 1:
            raise ValueError(f"chunks={chunks} must be at least 1")
        if (
            self.dispatch_fn is not None
            or self.part is not None
            or (self.sizes is None and chunks != len(self.futures))
        ):
            return [replace(self, dispatch_fn=partial(_piece, self.dispatch_fn, i, chunks)) for i in range(chunks)]
        if chunks == len(self.futures):
            return [self._shards(slice(i, i + 1)) for i in range(chunks)]
        if self._sizes_are_numbers():
            return [self._rows(start, stop) for start, stop in even_bounds(sum(self.sizes), chunks)]
        return [replace(self, part=(i, chunks)) for i in range(chunks)]

    def _sizes_are_numbers(self) -> bool:
        return self.sizes is not None and all(isinstance(size, int) for size in self.sizes)

    def _shards(self, which: slice) -> "DataProtoFuture":
        sizes = None if self.sizes is None else self.sizes[which]
        return replace(self, futures=self.futures[which], sizes=sizes)

    def _rows(self, start: int, stop: int) -> "DataProtoFuture":
        """The shards that hold rows [start, stop), cut to them; an empty piece fetches one shard, to
        know its columns.
        """
        ends = list(accumulate(self.sizes))
        first = next((i for i, end in enumerate(ends) if end > start), len(ends) - 1)
        last = next((i for i, end in enumerate(ends) if end >= stop and i >= first), first)
        offset = ends[first] - self.sizes[first]
        return replace(self._shards(slice(first, last + 1)), dispatch_fn=partial(_cut, start - offset, stop - offset))


def _piece(then: Callable[[Any], Any] | None, index: int, parts: int, batch: Any) -> Any:
    return (batch if then is None else then(batch)).chunk_uneven(parts)[index]


def _cut(start: int, stop: int, batch: Sequence) -> Any:
    return batch[start:stop]
