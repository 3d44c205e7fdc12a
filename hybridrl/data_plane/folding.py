"""Rows folded into one another and back, and rows cut across: what changes the number of rows without picking or dropping any."""

import math
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from hybridrl.data_plane.columns import Column
from hybridrl.errors import DataError

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto


def fold_batch_dim(data: "DataProto", new_batch_size: int) -> "DataProto":
    """Return `new_batch_size` rows, each holding consecutive old ones: a column (B, ...) becomes (new, B / new, ...)."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataError(f"{len(data)} rows cannot be folded into {new_batch_size} of equal size")
    return _reshape(data, new_batch_size, (new_batch_size, len(data) // new_batch_size), drop=1)


def unfold_batch_dim(data: "DataProto", batch_dims: int = 2) -> "DataProto":
    """Return the batch with the first `batch_dims` dimensions of every column made one; the inverse of `fold_batch_dim`."""
    leading = {name: tuple(column.shape[:batch_dims]) for name, column in {**_tensors(data), **data.non_tensor_batch}.items()}
    first = next(iter(leading.values()), ())
    if len(first) != batch_dims or set(leading.values()) != {first}:
        raise DataError(f"the first {batch_dims} dimensions must be the same in every column, got {leading}")
    num_rows = math.prod(first)
    return _reshape(data, num_rows, (num_rows,), drop=batch_dims)


def _tensors(data: "DataProto") -> dict[str, torch.Tensor]:
    return {} if data.batch is None else dict(data.batch.items())


def _reshape(data: "DataProto", num_rows: int, leading: tuple[int, ...], *, drop: int) -> "DataProto":
    nested = [name for name, tensor in _tensors(data).items() if tensor.is_nested]
    if nested:
        raise DataError(f"rows of nested columns cannot be folded: {nested}; pop them or make them dense")
    tensors = {name: tensor.reshape(*leading, *tensor.shape[drop:]) for name, tensor in _tensors(data).items()}
    arrays = {name: array.reshape(*leading, *array.shape[drop:]) for name, array in data.non_tensor_batch.items()}
    batch = None if data.batch is None else TensorDict(tensors, batch_size=[num_rows])
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)


def cut_across(name: str, column: Column, parts: int) -> Column:
    """Return (B * parts, W / parts, ...) of a column (B, W, ...): the `parts` pieces of a row in adjacent rows. Else DataError."""
    if parts < 1:
        raise ValueError(f"column {name!r} cannot be cut into {parts} parts; at least 1 is needed")
    nested = isinstance(column, torch.Tensor) and column.is_nested
    if nested or column.ndim < 2 or column.shape[1] % parts:
        shape = "jagged" if nested else tuple(column.shape)
        raise DataError(f"the second dimension of column {name!r}, which is {shape}, cannot be cut into {parts} equal parts")
    return column.reshape(len(column) * parts, column.shape[1] // parts, *column.shape[2:])
