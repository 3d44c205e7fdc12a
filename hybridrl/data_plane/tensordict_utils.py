"""TensorDicts as batches, verl's second protocol: `from hybridrl.data_plane import tensordict_utils as tu`.

A TensorDict with one batch dimension has rows. Tensors (dense or jagged) and `NonTensorStack` entries are columns.
`NonTensorData` entries belong to the whole batch, like meta_info in a `DataProto`. Every function keeps this
distinction, independent of the tensordict version's own chunk, cat and indexing. Operations on one column are in
`columns.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hybridrl.data_plane.batch import DataProto
from hybridrl.data_plane.columns import (
    RowIndex,
    check_tensor_column,
    concat_rows,
    deep_equal,
    jagged_dim,
    jagged_offsets,
)
from hybridrl.data_plane.conversion import NonTensorData, NonTensorStack, TensorDict, non_tensor_stack, plain_value
from hybridrl.data_plane.merging import list_of_dict_to_dict_of_list
from hybridrl.data_plane.merging import union_tensor_dict as union_tensor_dict
from hybridrl.data_plane.reshaping import pad_dataproto_to_divisor, unpad_dataproto
from hybridrl.data_plane.rows import iterate_mini_batches
from hybridrl.errors import DataError

# Entries.


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set a value of the whole batch, in place."""
    tensor_dict.set(key, NonTensorData(unwrap_non_tensor_data(val)))  # type: ignore[arg-type] # tensordict's omission


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: Sequence) -> None:
    """Set a column with one value of any kind per row, in place.

    Raises:
        DataError: The numbers of values and rows differ.
    """
    stack = val if isinstance(val, NonTensorStack) else non_tensor_stack(val)
    if tensor_dict.batch_size and len(stack) != len(tensor_dict):
        raise DataError(f"column {key!r} has {len(stack)} values, the batch has {len(tensor_dict)} rows")
    tensor_dict.set(key, stack)


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set lists as columns and everything else as values of the whole batch, in place.

    Returns the TensorDict.
    """
    for key, value in kwargs.items():
        assign = assign_non_tensor_stack if isinstance(value, list | NonTensorStack) else assign_non_tensor_data
        assign(tensor_dict, key, value)
    return tensor_dict


def unwrap_non_tensor_data(data: Any) -> Any:
    """Return the content of a `NonTensorData`, and anything else unchanged."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """Return a value of the whole batch without its wrapper, or the default."""
    return unwrap_non_tensor_data(data.get(key, default))


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """Return an entry as a tensor, a list (`NonTensorStack`) or a value (`NonTensorData`).

    Without the entry, return the default.
    """
    return plain_value(tensordict.get(key)) if key in tensordict.keys() else default


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Return the TensorDict with only these entries and the same rows, sharing storage.

    Raises:
        KeyError: One does not exist.
    """
    keys = list(keys)
    missing = [key for key in keys if key not in tensordict.keys()]
    if missing:
        raise KeyError(f"key {missing[0]!r} is not in the TensorDict; there are {sorted(tensordict.keys())}")
    return _with_entries({key: tensordict.get(key) for key in keys}, tensordict)


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """Remove an entry and return it as `get` does."""
    value = get(tensordict, key, default)
    if key in tensordict.keys():
        tensordict.del_(key)
    return value


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Remove these entries and return them as `get_keys` does.

    Raises:
        KeyError: One does not exist; nothing is removed.
    """
    popped = get_keys(tensordict, keys)
    for key in list(popped.keys()):
        tensordict.del_(key)
    return popped


# Construction.


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> TensorDict:
    """Return the TensorDict of columns and of values of the whole batch.

    Args:
        tensor_dict: Columns: tensors, lists, arrays or `NonTensorStack`. Lists and arrays become `NonTensorStack` and
            must not hold tensors. Without columns the batch size is [].
        non_tensor_dict: Values of the whole batch.

    Raises:
        DataError: Columns of different lengths, a name in both dicts, or a strided nested tensor.
        TypeError: A value cannot be a column.
    """
    non_tensor_dict = non_tensor_dict or {}
    twice = sorted(tensor_dict.keys() & non_tensor_dict.keys())
    if twice:
        raise DataError(f"tensor_dict and non_tensor_dict share the names {twice}; rename or drop one of each")
    columns = {key: _make_entry(key, value) for key, value in tensor_dict.items()}
    sizes = {key: len(column) for key, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"columns differ in their number of rows: {sizes}")
    meta = {key: NonTensorData(unwrap_non_tensor_data(value)) for key, value in non_tensor_dict.items()}
    return TensorDict({**columns, **meta}, batch_size=list(sizes.values())[:1])


def _make_entry(key: str, value: Any) -> torch.Tensor | NonTensorStack:
    if isinstance(value, NonTensorStack):
        return value
    if isinstance(value, list | np.ndarray):
        if any(isinstance(item, torch.Tensor) for item in value):
            raise TypeError(
                f"column {key!r} is a list of tensors; make it one tensor, or a jagged one by "
                "nested_tensor_from_tensor_list"
            )
        return non_tensor_stack(value)
    check_tensor_column(key, value)
    return value


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Return the TensorDict with one row per dict.

    Tensors without dimensions become one dense column. Other tensors become a jagged column even if their shapes agree,
    so that a batch of one row has the same kind of column. Everything else becomes a `NonTensorStack`.

    Raises:
        DataError: No dicts, or their keys differ.
    """
    if not list_of_dicts:
        raise DataError("got no dicts, so there are no columns; build an empty TensorDict with get_tensordict")
    columns = list_of_dict_to_dict_of_list(list_of_dicts)
    return TensorDict({key: _make_column(values) for key, values in columns.items()}, batch_size=[len(list_of_dicts)])


def _make_column(values: list) -> torch.Tensor | NonTensorStack:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return non_tensor_stack(values)
    return nested_tensor_from_tensor_list(values) if any(value.dim() for value in values) else torch.stack(values)


def nested_tensor_from_tensor_list(tensors: Sequence[torch.Tensor], ragged_idx: int | None = None) -> torch.Tensor:
    """Return the jagged tensor (B, ...) of B tensors that differ in one dimension.

    Keeps the gradient history.

    Args:
        ragged_idx: That dimension, counted in the result; default the last.

    Raises:
        DataError: The tensors differ in another dimension or in dtype.
    """
    if not tensors or not all(tensor.dim() == tensors[0].dim() > 0 for tensor in tensors):
        raise DataError(
            f"tensors must have the same number of dimensions, at least 1, got {[tuple(t.shape) for t in tensors]}"
        )
    ragged = tensors[0].dim() if ragged_idx is None else ragged_idx
    if not 1 <= ragged <= tensors[0].dim():
        raise DataError(
            f"ragged_idx={ragged} must be in [1, {tensors[0].dim()}], the dimensions of a tensor counted from 1"
        )
    kinds = {(tensor.dtype, *tensor.shape[: ragged - 1], *tensor.shape[ragged:]) for tensor in tensors}
    if len(kinds) > 1:
        raise DataError(
            f"tensors differ in more than dimension {ragged}: {[(t.dtype, tuple(t.shape)) for t in tensors]}"
        )
    values = torch.cat(list(tensors), dim=ragged - 1)
    lengths = torch.tensor([0, *(tensor.shape[ragged - 1] for tensor in tensors)], device=values.device)
    return torch.nested.nested_tensor_from_jagged(values, lengths.cumsum(0), jagged_dim=ragged)


def concat_nested_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all jagged tensors as one.

    Raises:
        DataError: Different dtypes or row shapes, or a tensor that is not jagged.
    """
    if not tensors or not all(tensor.is_nested for tensor in tensors):
        raise DataError(
            f"one or more jagged tensors are needed, got {[tuple(t.shape) for t in tensors if not t.is_nested]}"
        )
    for number, tensor in enumerate(tensors):
        check_tensor_column(f"tensor {number}", tensor)
    return concat_rows("nested", tensors)


def maybe_fix_3d_position_ids(data: TensorDict) -> None:
    """Make the last dimension of jagged 3-dimensional `position_ids` the ragged one, in place.

    Some transports lose which dimension is ragged.
    """
    position_ids = get(data, "position_ids")
    if isinstance(position_ids, torch.Tensor) and position_ids.is_nested and position_ids.dim() == 3:
        if jagged_dim(position_ids) == 2:
            return
        values, offsets = position_ids.values(), jagged_offsets(position_ids)
        data.set("position_ids", torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2))


# Rows.


def index_select_tensor_dict(batch: TensorDict | None, indices: RowIndex) -> TensorDict | None:
    """Return a copy of the selected rows, with the values of the whole batch.

    None gives None.

    Args:
        indices: Row numbers (negative ones count from the end) or a mask.
    """
    return None if batch is None else _select_rows(batch, indices)


def _select_rows(batch: TensorDict, indices: RowIndex) -> TensorDict:
    return _as_tensordict(_as_batch(batch).select_idxs(indices), batch)


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Return `chunks` batches of consecutive rows whose sizes differ by at most one, larger first.

    They may be empty. Dense columns are views.
    """
    return [_as_tensordict(chunk, td) for chunk in _as_batch(td).chunk_uneven(chunks)]


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of all TensorDicts, copied.

    A value of the whole batch comes from the first TensorDict that has it. TensorDicts without rows contribute no
    columns. Without batch dimension, see `concat_tensordict_with_none_bsz`.

    Raises:
        DataError: Columns, dtypes or row shapes differ.
    """
    if not data:
        raise DataError("concatenation needs one or more TensorDicts, got none")
    if not any(td.batch_size for td in data):
        return concat_tensordict_with_none_bsz(data)
    merged_meta: dict[str, Any] = {}
    for td in reversed(data):
        merged_meta |= meta_of(td)
    return concat_with_meta(data, merged_meta)


def concat_tensordict_with_none_bsz(data: Sequence[TensorDict]) -> TensorDict:
    """Return the first of some TensorDicts without batch dimension, which have no rows to join.

    Raises:
        DataError: One has a batch dimension.
    """
    sizes = [tuple(td.batch_size) for td in data]
    if not data or any(sizes):
        raise DataError(f"TensorDicts without batch dimension are needed, got batch sizes {sizes}")
    return data[0]


def concat_with_meta(data: Sequence[TensorDict], meta: Mapping[str, Any]) -> TensorDict:
    """Return the rows of all TensorDicts, copied, with these values of the whole batch."""
    rows = DataProto.concat([_as_batch(td).select(meta_info_keys=[]) for td in data])
    rows.meta_info = dict(meta)
    return _as_tensordict(rows, data[0])


def meta_of(td: TensorDict) -> dict[str, Any]:
    """Return the values of the whole batch."""
    return {key: entry.data for key, entry in td.items() if isinstance(entry, NonTensorData)}


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: dict[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Return an iterator over mini-batches, `epochs` times over all rows.

    `dataloader_kwargs={"shuffle": True}` shuffles the rows.
    """
    return iterate_mini_batches(
        _num_rows(tensordict),
        partial(_select_rows, tensordict),
        size=mini_batch_size,
        epochs=epochs,
        seed=seed,
        loader_kwargs=dataloader_kwargs,
    )


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Return (batch, added rows), with a number of rows that `size_divisor` divides.

    Rows are repeated from the first one on. Nothing is copied when nothing is added. An empty batch stays empty.
    """
    batch, num_added = pad_dataproto_to_divisor(_as_batch(data), size_divisor)
    return (_as_tensordict(batch, data), num_added) if num_added else (data, 0)


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Return the batch without its last `pad_size` rows."""
    batch = unpad_dataproto(_as_batch(data), pad_size)
    return _as_tensordict(batch, data) if pad_size else data


# Whole TensorDicts.


def contiguous(data: TensorDict) -> TensorDict:
    """Return a new TensorDict with the same entries whose tensors are contiguous."""
    return _with_entries({key: e.contiguous() if isinstance(e, torch.Tensor) else e for key, e in data.items()}, data)


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Raise AssertionError, naming the entry, unless both TensorDicts are equal.

    Compares names, kinds, dtypes, rows and values (NaN equals NaN).
    """
    first, second = (dict(td.items()) for td in (tensordict1, tensordict2))
    if first.keys() != second.keys():
        raise AssertionError(f"only one of the TensorDicts has {sorted(first.keys() ^ second.keys())}")
    if tensordict1.batch_size != tensordict2.batch_size:
        raise AssertionError(f"batch sizes differ: {tuple(tensordict1.batch_size)} and {tuple(tensordict2.batch_size)}")
    for key, value in first.items():
        if type(value) is not type(second[key]):
            raise AssertionError(f"entry {key!r} is {type(value).__name__} here and {type(second[key]).__name__} there")
        if not deep_equal(plain_value(value), plain_value(second[key])):
            raise AssertionError(f"entry {key!r} differs: {plain_value(value)} and {plain_value(second[key])}")


# TensorDicts as batches, and back.


def _num_rows(td: TensorDict) -> int:
    if len(td.batch_size) != 1:
        raise DataError(f"rows need one batch dimension, got batch_size {tuple(td.batch_size)}")
    return td.batch_size[0]


def _as_batch(td: TensorDict) -> DataProto:
    """Return the columns of a TensorDict, with its values of the whole batch as meta_info."""
    _num_rows(td)
    return DataProto.from_tensordict(td)


def _as_tensordict(batch: DataProto, like: TensorDict) -> TensorDict:
    return _with_entries(dict(batch.to_tensordict().items()), like, [len(batch)])


def _with_entries(entries: dict[str, Any], like: TensorDict, batch_size: Sequence[int] | None = None) -> TensorDict:
    return TensorDict(entries, batch_size=like.batch_size if batch_size is None else batch_size, device=like.device)
