"""`DataProtoFuture`: a batch that is still on the workers, as one reference per shard.

The driver moves references, not tokens. If a worker group has as many workers as the future has shards, each shard is
forwarded unread. This module does not interpret references: the creator of a future passes a function that fetches
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from hybridrl.data_plane.chunking import even_bounds
from hybridrl.errors import DataError

CollectFn = Callable[[list], Any]


def concat_shards(shards: list) -> Any:
    """Return the rows of all shards as one batch of the shards' class."""
    return type(shards[0]).concat(shards)


@dataclass
class DataProtoFuture:
    """A batch to be fetched. Forward it, or call `get()`. Picklable if its functions are.

    Attributes:
        collect_fn: Builds the batch from the fetched shards, in shard order. It must work row by row, so that some
            shards can be collected alone.
        futures: One reference per shard.
        dispatch_fn: Applied to the collected batch before it is returned.
        fetch: Returns the values of a list of references, with a timeout of its own. None when `futures` are the
            values.
        sizes: Rows of each shard, or a reference to that number. With them a chunk fetches only the shards it needs.
        part: (i, n) if this is chunk i of n and the sizes were still references when it was split.
    """

    collect_fn: CollectFn
    futures: list
    dispatch_fn: Callable[[Any], Any] | None = None
    fetch: Callable[[list], list] | None = None
    sizes: list | None = None
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None and len(self.sizes) != len(self.futures):
            raise ValueError(f"sizes={self.sizes} must give the rows of each of the {len(self.futures)} shards")

    @staticmethod
    def concat(
        data: list, *, fetch: Callable[[list], list] | None = None, sizes: list | None = None
    ) -> "DataProtoFuture":
        """Return the future of the concatenated batches behind a list of references."""
        return DataProtoFuture(collect_fn=concat_shards, futures=list(data), fetch=fetch, sizes=sizes)

    def get(self) -> Any:
        """Fetch the shards and return the batch.

        Raises:
            DataError: The rows do not match `sizes`. Errors of `fetch` are passed on.
        """
        batch = self._all_shards() if self.part is None else self._fetch_part(*self.part)
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)

    def _all_shards(self) -> Any:
        shards = self._values(self.futures)
        batch, sizes = self.collect_fn(shards), self._known_sizes()
        if sizes is not None and len(batch) != sum(sizes):
            raise DataError(f"the shards should have {sizes} rows and have {[len(s) for s in shards]}")
        return batch

    def _values(self, references: list) -> list:
        return self.fetch(references) if self.fetch else list(references)

    def _fetch_part(self, index: int, parts: int) -> Any:
        whole = replace(self, sizes=self._values(self.sizes or []), part=None, dispatch_fn=None)
        if whole._known_sizes() is None:
            raise DataError(f"the future cannot be chunked by rows: the shards' sizes are {whole.sizes}")
        return whole.chunk(parts)[index].get()

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Return `chunks` futures of consecutive rows, without fetching.

        As many chunks as shards: one shard each, of any size. Otherwise sizes differ by at most one row and each
        chunk fetches the shards it needs. Without `sizes`, or with a `dispatch_fn`, each chunk fetches all shards. A
        chunk's meta information comes from the shards it fetched.
        """
        if chunks < 1:
            raise ValueError(f"chunks={chunks} must be at least 1")
        if (
            self.dispatch_fn is not None
            or self.part is not None
            or (self.sizes is None and chunks != len(self.futures))
        ):
            return [replace(self, dispatch_fn=partial(_chunk_of, self.dispatch_fn, i, chunks)) for i in range(chunks)]
        if chunks == len(self.futures):
            return [self._shards(slice(i, i + 1)) for i in range(chunks)]
        sizes = self._known_sizes()
        if sizes is not None:
            return [self._rows(start, stop, sizes=sizes) for start, stop in even_bounds(sum(sizes), chunks)]
        return [replace(self, part=(i, chunks)) for i in range(chunks)]

    def _known_sizes(self) -> list[int] | None:
        """Return the rows of each shard; None if they are unknown or still references."""
        if self.sizes is None or not all(isinstance(size, int) for size in self.sizes):
            return None
        return self.sizes

    def _shards(self, which: slice) -> "DataProtoFuture":
        sizes = None if self.sizes is None else self.sizes[which]
        return replace(self, futures=self.futures[which], sizes=sizes)

    def _rows(self, start: int, stop: int, *, sizes: Sequence[int]) -> "DataProtoFuture":
        """Return a future of rows [start, stop) over the shards that hold them.

        An empty chunk fetches one shard, to get its columns.
        """
        ends = list(accumulate(sizes))
        first = next((i for i, end in enumerate(ends) if end > start), len(ends) - 1)
        last = next((i for i, end in enumerate(ends) if end >= stop and i >= first), first)
        offset = ends[first] - sizes[first]
        return replace(
            self._shards(slice(first, last + 1)), dispatch_fn=partial(_slice_of, start - offset, stop - offset)
        )


def _chunk_of(then: Callable[[Any], Any] | None, index: int, parts: int, batch: Any) -> Any:
    return (batch if then is None else then(batch)).chunk_uneven(parts)[index]


def _slice_of(start: int, stop: int, batch: Sequence) -> Any:
    return batch[start:stop]
