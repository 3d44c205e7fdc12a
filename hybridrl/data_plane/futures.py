"""References in place of data: `DataProtoFuture` for a batch, `StoredArray` for an array.

The driver moves references, not tokens. If a worker group has as many workers as the future has shards, each shard is
forwarded unread. The large arrays of a batch that the driver does read, such as the patches of images, are stored by
the process that makes them, and read by the workers that compute with them.

This module does not interpret references: who makes them passes a function that fetches them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from hybridrl.data_plane.chunking import even_bounds
from hybridrl.errors import DataError

CollectFn = Callable[[list], Any]
Fetch = Callable[[list], list]
StoreArrays = Callable[[list[np.ndarray]], tuple[Any, Fetch] | None]
# A store takes some milliseconds for an object of any size. Smaller arrays are stored together, up to this size.
BLOCK_BYTES = 4 * 1024**2
# Arrays that together have less are cheaper to send than to store.
MIN_STORED_BYTES = 16 * 1024


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


class StoredArray:
    """An array that processes send each other as a reference, until one reads it.

    Not written to.

    Ray sends the reference (`single_controller/processes/array_store.py`). Any other pickle has the array itself, a
    plain one. So an entry of an object column may be either; `array_of` reads both.

    Args:
        block: Arrays that were stored together.
        index: Which of them.
    """

    __slots__ = ("block", "index")

    def __init__(self, block: "StoredBlock", index: int):
        self.block, self.index = block, index

    def read(self) -> np.ndarray:
        """Return the array; it may be read-only memory that other processes read, too."""
        return self.block.read()[self.index]

    def __reduce__(self) -> tuple:
        return np.asarray, (self.read(),)

    def __deepcopy__(self, memo: Any) -> "StoredArray":
        return self


@dataclass(eq=False)
class StoredBlock:
    """Arrays behind one reference.

    Attributes:
        reference: Of the list of arrays.
        fetch: Returns the values of a list of references, with a timeout of its own.
        arrays: The list, once this process has read it.
    """

    reference: Any
    fetch: Fetch
    arrays: list[np.ndarray] | None = None

    def read(self) -> list[np.ndarray]:
        """Return the arrays, from the second time on without fetching them."""
        if self.arrays is None:
            [self.arrays] = self.fetch([self.reference])
        return self.arrays

    def __reduce__(self) -> tuple:
        return StoredBlock, (self.reference, self.fetch)


class _Store:
    """The store of this process; None in one without Ray."""

    put: StoreArrays | None = None


def use_array_store(put: StoreArrays) -> None:
    """Let `stored` put arrays there from now on; `put` returns reference and fetch, or None."""
    _Store.put = put


def stored(arrays: Sequence[np.ndarray]) -> list[Any]:
    """Return entries of an object column, stored ones if this process has a store.

    Small arrays stay as they are.
    """
    if _Store.put is None or sum(array.nbytes for array in arrays) < MIN_STORED_BYTES:
        return list(arrays)
    entries: list[Any] = []
    for group in _groups(arrays):
        found = _Store.put(group)
        block = None if found is None else StoredBlock(*found)
        entries += group if block is None else [StoredArray(block, index) for index in range(len(group))]
    return entries


def _groups(arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return consecutive arrays in groups of at most `BLOCK_BYTES`, or of one larger array."""
    groups: list[list[np.ndarray]] = []
    size = 0
    for array in arrays:
        size += array.nbytes
        if not groups or size > BLOCK_BYTES:
            groups.append([])
            size = array.nbytes
        groups[-1].append(array)
    return groups


def array_of(entry: Any) -> Any:
    """Return the array of an entry that may be a `StoredArray`; anything else unchanged."""
    return entry.read() if isinstance(entry, StoredArray) else entry


def arrays_of(entries: Iterable[Any]) -> list[Any]:
    """Return `array_of` each entry. All that is not here yet is fetched at once."""
    entries = list(entries)
    missing = {id(entry.block): entry.block for entry in entries if isinstance(entry, StoredArray)}
    by_fetch: dict[Fetch, list[StoredBlock]] = {}
    for block in missing.values():
        if block.arrays is None:
            by_fetch.setdefault(block.fetch, []).append(block)
    for fetch, blocks in by_fetch.items():
        for block, arrays in zip(blocks, fetch([block.reference for block in blocks]), strict=True):
            block.arrays = arrays
    return list(map(array_of, entries))


def stored_again(column: np.ndarray) -> np.ndarray:
    """Return a column whose stored arrays outlive the processes that made them."""
    places = [row for row, entry in enumerate(column) if isinstance(entry, StoredArray)]
    if not places:
        return column
    column = column.copy()
    for place, entry in zip(places, stored(arrays_of(column[places])), strict=True):
        column[place] = entry
    return column
