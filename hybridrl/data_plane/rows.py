"""`Rows`: what a batch consists of, and the selection, repetition and cutting of its rows.

`DataProto` (`batch.py`) adds how a batch is made, converted and merged, and what its columns are called.

Writes to received tensor columns stay private to the process. Ray maps a received buffer straight from memory that all
readers on the machine share, and maps it *writable*. numpy refuses to write to it. torch does not: an in-place write
succeeds and changes what every other reader gets from then on. Copying on arrival would be safe but costs more than
sending and receiving together. So a received column is copied when it is first handed out for anything but reading in
this package. Code that only forwards a batch, concatenates it or selects rows never pays. torch's own copy-on-write
storage (`torch._lazy_clone`) refuses memory that torch did not allocate.

Numeric array columns are small and copied on arrival. Arrays inside object columns and inside meta_info stay read-only,
enforced by numpy: copy one before `torch.from_numpy`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from hybridrl.data_plane import columns
from hybridrl.data_plane.chunking import AUTO_PADDING_KEY, DataProtoConfig, even_bounds
from hybridrl.data_plane.columns import RowIndex
from hybridrl.data_plane.conversion import TensorDict
from hybridrl.data_plane.merging import select_entries
from hybridrl.errors import DataError

B = TypeVar("B")
# Two threads of a driver may read the same received batch at once; both must get the same copy.
_COPYING = threading.Lock()


@dataclass
class DataProtoItem:
    """One row: a TensorDict without batch dimension, {column: value}, and the batch's meta_info."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class Rows:
    """Rows of tensor columns, array columns and meta_info; see `DataProto`, which users have.

    Methods return new batches that share meta_info, unless they say "in place".
    """

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ):
        self.batch = batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self.check_consistency()

    @property
    def batch(self) -> TensorDict:
        """The tensor columns, private to this process from now on.

        None if there are no columns; the annotation omits this.
        """
        self._make_private()
        return self._batch  # type: ignore[return-value]

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self._batch = batch
        self._shared: set[str] = set()

    def _set_shared(self, batch: TensorDict, shared: set[str]) -> None:
        """Set a TensorDict whose columns named in `shared` must not be written to."""
        self._batch, self._shared = batch, shared

    def _make_private(self, names: Iterable[str] | None = None) -> None:
        """Copy the named columns (default: all) out of shared memory."""
        if self._batch is None or not self._shared:
            return
        with _COPYING:
            for name in self._shared & set(self._shared if names is None else names):
                self._batch.set(name, columns.private_copy(self._batch.get(name)))
                self._shared.discard(name)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensor columns, for reading only."""
        return {} if self._batch is None else cast(dict[str, torch.Tensor], dict(self._batch.items()))

    def check_consistency(self) -> None:
        """Check that this is a batch: one batch dimension, columns of one length.

        Raises:
            TypeError: A part or a column has the wrong type.
            DataError: Columns have different lengths or unsupported layouts.
        """
        if not isinstance(self.non_tensor_batch, dict) or not isinstance(self.meta_info, dict):
            raise TypeError("non_tensor_batch and meta_info must be dicts")
        if self._batch is not None:
            if not isinstance(self._batch, TensorDict):
                raise TypeError(
                    f"batch must be a TensorDict, got {type(self._batch).__name__}; DataProto.from_dict takes dicts"
                )
            if len(self._batch.batch_size) != 1:
                raise DataError(f"batch must have one batch dimension, got batch_size {tuple(self._batch.batch_size)}")
        for name, tensor in self._tensors().items():
            columns.check_tensor_column(name, tensor)
        for name, array in self.non_tensor_batch.items():
            columns.check_array_column(name, array, len(self))

    def __len__(self) -> int:
        if self._batch is not None:
            return self._batch.batch_size[0]
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __getitem__(self, rows: int | slice | RowIndex) -> Any:
        """Return the selected rows.

        A slice gives a view; a list, array, tensor or mask a copy; an int one row.
        """
        if isinstance(rows, slice):
            return self.slice(rows.start, rows.stop, rows.step)
        if isinstance(rows, list | np.ndarray | torch.Tensor):
            return self.select_idxs(rows)
        if isinstance(rows, int | np.integer):
            return self._item(int(columns.row_index([rows], len(self))))
        raise TypeError(f"rows are selected by int, slice, list, array or tensor, got {type(rows).__name__}")

    def _item(self, row: int) -> DataProtoItem:
        batch = None if self.batch is None else self.batch[row]
        return DataProtoItem(batch, {name: array[row] for name, array in self.non_tensor_batch.items()}, self.meta_info)

    def _map_columns(self, change: Callable[[Any], Any], *, num_rows: int) -> Self:
        """Return the batch with every column changed into one of its kind."""
        tensors = {name: change(tensor) for name, tensor in self._tensors().items()}
        arrays = {name: change(array) for name, array in self.non_tensor_batch.items()}
        return self._with_columns(None if self._batch is None else TensorDict(tensors, batch_size=[num_rows]), arrays)

    def _take_rows(self, rows: torch.Tensor) -> Self:
        return self._map_columns(partial(columns.take_rows, rows=rows), num_rows=len(rows))

    def split_at(self, bounds: Sequence[tuple[int, int]]) -> list[Self]:
        """Return views of these [start, stop) ranges of rows."""
        self._make_private()
        starts, stops = [start for start, _ in bounds], [stop for _, stop in bounds]
        is_partition = [0, *stops] == [*starts, len(self)]
        if self._batch is None or not is_partition or any(t.is_nested for t in self._tensors().values()):
            return [
                self._map_columns(partial(columns.slice_rows, start=start, stop=stop), num_rows=stop - start)
                for start, stop in bounds
            ]
        batches = self._batch.split([stop - start for start, stop in bounds])  # faster than slices
        arrays = ({k: v[start:stop] for k, v in self.non_tensor_batch.items()} for start, stop in bounds)
        return [self._with_columns(batch, own) for batch, own in zip(batches, arrays, strict=True)]

    def _with_columns(self, batch: TensorDict | None, arrays: dict[str, np.ndarray]) -> Self:
        """Return a batch of these columns with the same meta_info, without checks."""
        if type(self).__init__ is not Rows.__init__:
            return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)
        new = object.__new__(type(self))
        new.batch, new.non_tensor_batch, new.meta_info = batch, arrays, self.meta_info
        return new

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Return a copy of the selected rows.

        Args:
            idxs: Row numbers (negative ones count from the end) or a mask, as list, array or tensor.
        """
        return self._take_rows(columns.row_index(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return rows as Python's slicing does: a view, or with a step a copy."""
        first, last, stride = slice(start, end, step).indices(len(self))
        if stride != 1:
            return self._take_rows(torch.tensor(range(first, last, stride), dtype=torch.int64))
        return self.split_at([(first, max(first, last))])[0]

    def reorder(self, indices: RowIndex) -> None:
        """Reorder the rows, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered._batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return each row `repeat_times` times.

        Copies of a row are adjacent, or without `interleave` the whole batch is repeated.
        """
        rows = torch.arange(len(self))
        return self._take_rows(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Return row i `repeat_times[i]` times, in adjacent rows."""
        times = torch.as_tensor(repeat_times, dtype=torch.int64).cpu()
        if times.shape != (len(self),) or bool((times < 0).any()):
            raise ValueError(f"repeat_times must be {len(self)} counts, one per row, got {times.tolist()}")
        return self._take_rows(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Return `n_split` rows for each row.

        Columns in `split_keys` are split along their second dimension, the others repeated.
        """
        self._make_private(split_keys or ())
        cut = select_entries("column", {**self._tensors(), **self.non_tensor_batch}, split_keys or ())
        cut = {name: columns.split_across_columns(name, column, n_split) for name, column in cut.items()}
        repeated = self.repeat(n_split)
        for name, column in cut.items():
            (repeated.batch if isinstance(column, torch.Tensor) else repeated.non_tensor_batch)[name] = column
        return repeated

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Return an iterator over mini-batches, `epochs` times over all rows.

        `dataloader_kwargs={"shuffle": True}` shuffles the rows.
        """
        return iterate_mini_batches(
            len(self), self.select_idxs, size=mini_batch_size, epochs=epochs, seed=seed, loader_kwargs=dataloader_kwargs
        )

    # Chunks.

    def is_padding_enabled(self) -> bool:
        """Return whether `chunk` may return chunks of different sizes.

        auto_padding of this batch or of `DataProtoConfig` allows it.
        """
        return bool(self.meta_info.get(AUTO_PADDING_KEY)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append the last row ("first": the first one) `padding_size` times, in place."""
        row = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder([*range(len(self)), *[row] * padding_size])

    def chunk(self, chunks: int) -> list[Self]:
        """Return `chunks` views of equal size.

        With auto padding any number of rows is accepted: full chunks first, then shorter or empty ones.

        Raises:
            DataError: The rows do not divide and auto padding is off.
        """
        bounds = even_bounds(len(self), chunks)
        if len(self) % chunks:
            if not self.is_padding_enabled():
                hint = "pad with pad_dataproto_to_divisor or use chunk_uneven"
                raise DataError(f"{len(self)} rows cannot be chunked into {chunks} equal chunks; {hint}")
            ends = [min(bounds[0][1] * number, len(self)) for number in range(chunks + 1)]
            bounds = list(zip(ends, ends[1:], strict=False))
        return self.split_at(bounds)

    def chunk_uneven(self, chunks: int) -> list[Self]:
        """Return `chunks` views whose sizes differ by at most one row, larger first.

        A chunk may be empty and keeps the columns.
        """
        return self.split_at(even_bounds(len(self), chunks))

    def split(self, split_size: int) -> list[Self]:
        """Return views of `split_size` rows; the last one may be shorter."""
        if split_size < 1:
            raise ValueError(f"split_size={split_size} must be at least 1")
        return self.split_at([(start, min(start + split_size, len(self))) for start in range(0, len(self), split_size)])


def iterate_mini_batches(
    num_rows: int,
    select: Callable[[list[int]], B],
    *,
    size: int,
    epochs: int,
    seed: int | None,
    loader_kwargs: Mapping[str, Any] | None,
) -> Iterator[B]:
    """Return an iterator over `select(row numbers)`, `size` rows at a time, `epochs` times.

    Args:
        size: Must divide `num_rows`, else ValueError.
        seed: Seed of the order; None uses torch's own.
        loader_kwargs: Arguments of torch's DataLoader; `{"shuffle": True}` shuffles the rows.
    """
    if size < 1 or num_rows % size:
        raise ValueError(
            f"{num_rows} rows cannot be iterated in mini-batches of {size}; pad them to a multiple of it first"
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows: Any = range(num_rows)  # the loader draws row numbers; a mini-batch's rows are then selected at once
    loader = DataLoader(rows, size, collate_fn=select, generator=generator, **(loader_kwargs or {}))
    return (mini_batch for _ in range(epochs) for mini_batch in loader)
