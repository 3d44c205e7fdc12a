"""`DataProto`: a batch of rows, stored as columns. It is the one container that crosses processes.

    batch              TensorDict with one batch dimension: the tensor columns, or None
    non_tensor_batch   dict of numpy arrays (object arrays for anything): the other columns, same rows
    meta_info          dict: values of the whole batch

Names and semantics are verl's. Writing to a received batch is safe and private (`sharing.py`). This module implements
operations on whole batches. Operations on one column are in `columns.py`, merging rules in `merging.py`, bytes in
`serialization.py`, and references to remote batches in `futures.py`.
"""

import copy
import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, SupportsIndex, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from hybridrl.data_plane import columns, conversion, merging, serialization
from hybridrl.data_plane.chunking import AUTO_PADDING_KEY, DataProtoConfig, even_bounds
from hybridrl.data_plane.columns import RowIndex
from hybridrl.data_plane.items import DataProtoItem
from hybridrl.data_plane.merging import (
    list_of_dict_to_dict_of_list,
    select_entries,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from hybridrl.data_plane.row_iterator import iterate_mini_batches
from hybridrl.data_plane.sharing import CopyOnWrite
from hybridrl.errors import DataError

logger = logging.getLogger(__name__)

D = TypeVar("D", bound="DataProto")


class DataProto(CopyOnWrite):
    """A batch of rows in three parts, see the module.

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

    @property
    def nbytes(self) -> int:
        """The size of the tensor columns in bytes."""
        return sum(map(columns.num_bytes, self._tensors().values()))

    def __repr__(self) -> str:
        names = ", ".join([*self._tensors(), *self.non_tensor_batch])
        return f"{type(self).__name__}({len(self)} rows of {names or 'no columns'}; meta_info {list(self.meta_info)})"

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

    def _split_at(self, bounds: Sequence[tuple[int, int]]) -> list[Self]:
        self._make_private()
        if (
            self._batch is None
            or not columns.is_partition(bounds, len(self))
            or any(t.is_nested for t in self._tensors().values())
        ):
            return [
                self._map_columns(partial(columns.slice_rows, start=start, stop=stop), num_rows=stop - start)
                for start, stop in bounds
            ]
        is_even = bounds[0][1] * len(bounds) == len(self) > 0  # TensorDict splits equal parts faster
        batches = (
            self._batch.chunk(len(bounds)) if is_even else self._batch.split([stop - start for start, stop in bounds])
        )
        arrays = ({k: v[start:stop] for k, v in self.non_tensor_batch.items()} for start, stop in bounds)
        return [self._with_columns(batch, own) for batch, own in zip(batches, arrays, strict=True)]

    def _with_columns(self, batch: TensorDict | None, arrays: dict[str, np.ndarray]) -> Self:
        """Return a batch of these columns with the same meta_info, without checks."""
        if type(self).__init__ is not DataProto.__init__:
            return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)
        new = object.__new__(type(self))
        new.batch, new.non_tensor_batch, new.meta_info = batch, arrays, self.meta_info
        return new

    # Conversion.

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, torch.Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Return the batch of a dict that mixes tensors and arrays.

        Raises:
            DataError: Another type of value.
        """
        unsupported = [
            f"{name!r} is {type(v).__name__}"
            for name, v in data.items()
            if not isinstance(v, torch.Tensor | np.ndarray)
        ]
        if unsupported:
            raise DataError(f"columns must be tensors or numpy arrays: {', '.join(unsupported)}")
        tensors = {name: v for name, v in data.items() if isinstance(v, torch.Tensor)}
        arrays = {name: v for name, v in data.items() if isinstance(v, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Return the batch of these columns; lists among `non_tensors` become object arrays.

        Raises:
            DataError: Columns of different lengths, or `num_batch_dims` is not 1.
        """
        if num_batch_dims != 1:
            raise DataError(
                f"num_batch_dims={num_batch_dims}: a batch has one batch dimension; flatten the others into it"
            )
        for name, tensor in (tensors or {}).items():
            columns.check_tensor_column(name, tensor)
        sizes = {name: tensor.shape[0] for name, tensor in (tensors or {}).items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"batch columns differ in their number of rows: {sizes}")
        batch = TensorDict(tensors, batch_size=[next(iter(sizes.values()))]) if sizes else None
        arrays = {
            name: v if isinstance(v, np.ndarray) else columns.object_array(v) for name, v in (non_tensors or {}).items()
        }
        if auto_padding:
            meta_info = {**(meta_info or {}), AUTO_PADDING_KEY: True}
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None) -> Self:
        """Return the batch of a TensorDict.

        `NonTensorStack` entries are columns, `NonTensorData` entries meta information.
        """
        tensors, arrays, found = conversion.split_tensordict(tensor_dict)
        found |= meta_info or {}
        no_columns = not tensors and not arrays and len(tensor_dict.batch_size) == 1  # it may still have rows
        return (
            cls(TensorDict({}, tensor_dict.batch_size), meta_info=found)
            if no_columns
            else cls.from_dict(tensors, arrays, found)
        )

    def to_tensordict(self) -> TensorDict:
        """Return everything as one TensorDict, the inverse of `from_tensordict`.

        Raises:
            DataError: A name is used twice.
        """
        self._make_private()
        return conversion.join_tensordict(self._tensors(), self.non_tensor_batch, self.meta_info, num_rows=len(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """Support pickle.

        Protocol 5 sends tensors and numeric arrays out of band, other columns and meta_info in band. Tensors arrive on
        the CPU.
        """
        return _restore, (type(self), *self._encode(operator.index(protocol)))

    def _encode(self, protocol: int) -> tuple:
        batch = (
            None
            if self._batch is None
            else serialization.serialize_tensordict(self._batch, protocol=protocol, read_only=self._shared)
        )
        return batch, serialization.contiguous_arrays(self.non_tensor_batch), self.meta_info

    def save_to_disk(self, filepath: str | os.PathLike) -> None:
        """Write the batch to a file, atomically.

        Raises:
            DataError: A value is not plain data.
        """
        serialization.save_plain(filepath, self._encode(protocol=5))

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike) -> Self:
        """Return the batch that `save_to_disk` wrote, on the CPU. The file cannot execute code."""
        return _restore(cls, *serialization.load_plain(filepath))

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors to a device, in place, and return the batch."""
        if self._batch is not None:
            moved = self._batch.to(device)
            self._set_shared(moved, {name for name in self._shared if moved.get(name).device.type == "cpu"})
        return self

    def print_size(self, prefix: str = "") -> None:
        """Log the sizes of the tensors and of the arrays in GB."""
        report = conversion.size_report(self._tensors().values(), self.non_tensor_batch.values())
        logger.info("%s", f"{prefix}, {report}" if prefix else report)

    def get_data_info(self) -> str:
        """Return one line per column and meta_info key: shapes, dtypes, devices, types."""
        return conversion.describe(self._tensors(), self.non_tensor_batch, self.meta_info)

    # Columns.

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return the batch with only these columns (None: all), sharing storage.

        Args:
            deepcopy: Copy arrays and meta_info, but not tensors.
        """
        names = list(self._tensors()) if batch_keys is None else batch_keys
        self._make_private(names)
        tensors = select_entries("batch column", self._tensors(), names)
        arrays = select_entries("non_tensor_batch column", self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = (
            self.meta_info
            if meta_info_keys is None
            else select_entries("meta_info key", self.meta_info, meta_info_keys)
        )
        if deepcopy:
            arrays, meta_info = copy.deepcopy((arrays, meta_info))
        selected = self._with_columns(None if self._batch is None else self._batch.select(*tensors), arrays)
        selected.meta_info = meta_info
        return selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove these columns and keys in place and return them as a batch.

        Raises:
            DataError: One does not exist; nothing is removed.
        """
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        if not popped._tensors():
            popped.batch = None
        if self._batch is not None:  # without it, `select` has refused any name
            for name in batch_keys or ():
                self._batch.del_(name)
        for name in non_tensor_batch_keys or ():
            del self.non_tensor_batch[name]
        for name in meta_info_keys or ():
            del self.meta_info[name]
        return popped

    def rename(self, old_keys: str | list[str] | None = None, new_keys: str | list[str] | None = None) -> Self:
        """Rename tensor columns, in place, and return the batch.

        All names change at once, so two columns may swap theirs.
        """
        names = merging.rename_keys(list(self._tensors()), old_keys, new_keys)
        self.batch = TensorDict(dict(zip(names, self.batch.values(), strict=True)), batch_size=[len(self)])
        return self

    def union(self, other: "DataProto") -> Self:
        """Add the other batch's columns and meta_info, in place, and return this batch.

        Raises:
            DataError: A name in both has different content (NaN equals NaN), or the numbers of rows differ. Nothing is
                changed.
        """
        if (self._tensors() or self.non_tensor_batch) and len(self) != len(other):
            raise DataError(f"a batch of {len(self)} rows cannot be merged with one of {len(other)} rows")
        # Check everything before changing anything.
        merging.check_union("non_tensor_batch column", self.non_tensor_batch, other.non_tensor_batch)
        merging.check_union("meta_info key", self.meta_info, other.meta_info)
        if other._batch is not None:
            own = TensorDict({}, batch_size=[len(other)]) if self._batch is None else self._batch
            other._make_private(other._tensors().keys() - self._tensors().keys())
            self._set_shared(union_tensor_dict(own, other._batch), self._shared)
        union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        union_two_dict(self.meta_info, other.meta_info)
        return self

    # Rows.

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
        return self._split_at([(first, max(first, last))])[0]

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
            len(self),
            self.select_idxs,
            size=mini_batch_size,
            epochs=epochs,
            seed=seed,
            loader_kwargs=dataloader_kwargs,
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
        return self._split_at(bounds)

    def chunk_uneven(self, chunks: int) -> list[Self]:
        """Return `chunks` views whose sizes differ by at most one row, larger first.

        A chunk may be empty and keeps the columns.
        """
        return self._split_at(even_bounds(len(self), chunks))

    def split(self, split_size: int) -> list[Self]:
        """Return views of `split_size` rows; the last one may be shorter."""
        if split_size < 1:
            raise ValueError(f"split_size={split_size} must be at least 1")
        return self._split_at(
            [(start, min(start + split_size, len(self))) for start in range(0, len(self), split_size)]
        )

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """Return the rows of all batches, copied, in the class of the first.

        `meta_info["metrics"]` of all batches becomes one dict of lists. Other keys must agree. Batches without rows
        contribute only meta_info.

        Raises:
            TypeError: No batch, or not a DataProto.
            DataError: Columns, dtypes or row shapes differ; the message names the column.
        """
        if not data or not all(isinstance(batch, DataProto) for batch in data):
            raise TypeError(f"concat takes one or more DataProto, got {[type(batch).__name__ for batch in data]}")
        meta_info = merging.merge_meta_info(batch.meta_info for batch in data)
        sources = (
            [b for b in data if len(b)]
            or [b for b in data if b._batch is not None or b.non_tensor_batch][:1]
            or data[:1]
        )
        tensors = merging.concat_columns([source._tensors() for source in sources])
        arrays = merging.concat_columns([source.non_tensor_batch for source in sources])
        has_batch = any(source._batch is not None for source in sources)
        batch = TensorDict(tensors, batch_size=[sum(map(len, sources))]) if has_batch else None
        return type(data[0])(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)


def _restore(
    cls: type[D], batch: tuple[int, dict] | None, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> D:
    """Return the batch of a pickle or a file.

    Tensors stay in the received buffers until they are first accessed.
    """
    data = cls(non_tensor_batch=serialization.writable_arrays(arrays), meta_info=meta_info)
    if batch is not None:
        data._set_shared(*serialization.columns_from_buffer(*batch))
    return data


def collate_fn(data_items: Sequence[DataProtoItem]) -> DataProto:
    """Return the batch of these rows, which must have the same columns.

    meta_info is merged as in `DataProto.concat`.
    """
    rows: list[dict[str, Any]] = [
        {} if item.batch is None else {k: v.unsqueeze(0) for k, v in item.batch.items()} for item in data_items
    ]
    values = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in data_items])
    arrays = {name: conversion.column_array(column) for name, column in values.items()}
    return DataProto.from_dict(
        merging.concat_columns(rows), arrays, merging.merge_meta_info(item.meta_info for item in data_items)
    )
