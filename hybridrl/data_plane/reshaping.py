"""Change the number of rows of a batch: fold, unfold, pad, unpad, gather.

Dispatch does not need the padding functions, because it sends any batch to any number of workers. They are for code
that splits batches itself.
"""

import math

import torch
import torch.distributed as dist
from tensordict import TensorDict

from hybridrl.data_plane.batch import DataProto
from hybridrl.data_plane.columns import Column
from hybridrl.data_plane.gathering import all_gather_columns
from hybridrl.errors import DataError


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Return `new_batch_size` rows, each of consecutive old ones.

    A column (B, ...) becomes (new, B / new, ...).
    """
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataError(f"{len(data)} rows cannot be folded into {new_batch_size} of equal size")
    return _reshape(data, new_batch_size, (new_batch_size, len(data) // new_batch_size), drop=1)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Return the batch with the first `batch_dims` dimensions of every column merged.

    The inverse of `fold_batch_dim`.
    """
    columns: dict[str, Column] = {**_tensors(data), **data.non_tensor_batch}
    leading = {name: tuple(column.shape[:batch_dims]) for name, column in columns.items()}
    first = next(iter(leading.values()), ())
    if len(first) != batch_dims or set(leading.values()) != {first}:
        raise DataError(f"the first {batch_dims} dimensions must be the same in every column, got {leading}")
    num_rows = math.prod(first)
    return _reshape(data, num_rows, (num_rows,), drop=batch_dims)


def _tensors(data: DataProto) -> dict[str, torch.Tensor]:
    data._make_private()
    return data._tensors()


def _reshape(data: DataProto, num_rows: int, leading: tuple[int, ...], *, drop: int) -> DataProto:
    nested = [name for name, tensor in _tensors(data).items() if tensor.is_nested]
    if nested:
        raise DataError(f"nested columns cannot be folded: {nested}; pop them or make them dense")
    tensors = {name: tensor.reshape(*leading, *tensor.shape[drop:]) for name, tensor in _tensors(data).items()}
    arrays = {name: array.reshape(*leading, *array.shape[drop:]) for name, array in data.non_tensor_batch.items()}
    batch = None if data.batch is None else TensorDict(tensors, batch_size=[num_rows])
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return (batch, added rows), with a number of rows that `size_divisor` divides.

    Rows are repeated from the first one on. Nothing is copied when nothing is added. An empty batch stays empty.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor={size_divisor} must be at least 1")
    num_added = -len(data) % size_divisor
    if num_added == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + num_added) % len(data)), num_added


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last `pad_size` rows (a view)."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"pad_size={pad_size} rows cannot be dropped from a batch of {len(data)}")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace the batch's rows by those of all ranks, in place. Collective.

    The rows are in rank order. Every rank of the group waits for the others, at most for the group's timeout. meta_info
    stays the rank's own. Numbers of rows may differ. A rank without rows does not need the columns. Each tensor stays
    on this rank's device.

    Raises:
        DataError: Columns, dtypes or row shapes differ. Raised on every rank; the batch is unchanged.
    """
    tensors, arrays, num_rows = all_gather_columns(
        data._tensors(), data.non_tensor_batch, num_rows=len(data), group=process_group
    )
    data.batch = TensorDict(tensors, batch_size=[num_rows]) if tensors or data._batch is not None else None
    data.non_tensor_batch = arrays
