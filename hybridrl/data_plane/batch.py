"""`DataProto`: a batch of rows, stored as columns.

It is the one container that crosses processes.

    batch              TensorDict with one batch dimension: the tensor columns, or None
    non_tensor_batch   dict of numpy arrays (object arrays for anything): the other columns, same rows
    meta_info          dict: values of the whole batch

Names and semantics are verl's. Writing to a received batch is safe and private (`rows.py`). This module makes,
converts and merges whole batches. Operations on their rows are in `rows.py`, on one column in `columns.py`, merging
rules in `merging.py`, bytes in `serialization.py`, and references to remote batches in `futures.py`.
"""

import copy
import functools
import logging
import operator
import os
from collections.abc import Sequence
from typing import Any, Self, SupportsIndex, TypeVar

import numpy as np
import torch

from hybridrl.data_plane import columns, conversion, futures, merging, serialization
from hybridrl.data_plane.chunking import AUTO_PADDING_KEY
from hybridrl.data_plane.conversion import TensorDict
from hybridrl.data_plane.merging import (
    list_of_dict_to_dict_of_list,
    select_entries,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from hybridrl.data_plane.rows import DataProtoItem, Rows
from hybridrl.errors import DataError

logger = logging.getLogger(__name__)

D = TypeVar("D", bound="DataProto")


class DataProto(Rows):
    """A batch of rows in three parts, see the module.

    Operations on its rows are those of `Rows`.

    Methods return new batches that share meta_info, unless they say "in place".
    """

    @property
    def nbytes(self) -> int:
        """The size of the tensor columns in bytes."""
        return sum(map(columns.num_bytes, self._tensors().values()))

    def __repr__(self) -> str:
        names = ", ".join([*self._tensors(), *self.non_tensor_batch])
        return f"{type(self).__name__}({len(self)} rows of {names or 'no columns'}; meta_info {list(self.meta_info)})"

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
        return serialization.load_plain(filepath, functools.partial(_restore, cls))

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

    def stored_again(self) -> Self:
        """Return the batch for later steps, whose stored arrays this process has stored."""
        kept = self.select()
        kept.non_tensor_batch = {name: futures.stored_again(column) for name, column in self.non_tensor_batch.items()}
        return kept

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
