"""Change the number of rows of a batch: fold, unfold, pad, unpad, gather.

Dispatch does not need the padding functions, because it sends any batch to any number of workers. They are for code
that splits batches itself.

Gathering is for code that runs inside one group of workers. Every rank first exchanges column specs, so that a mismatch
is raised everywhere before any rank waits for tensors that never come. Tensors then travel as bytes, padded to the
largest rank's: any dtype, any number of rows per rank, any backend.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.data_plane.batch import DataProto
from hybridrl.data_plane.columns import Column, jagged_dim, jagged_offsets, without_holes
from hybridrl.data_plane.conversion import TensorDict
from hybridrl.data_plane.merging import concat_columns
from hybridrl.data_plane.serialization import flat_bytes
from hybridrl.errors import DataError

Parts = tuple[torch.Tensor, ...]


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


@dataclass(frozen=True)
class _ColumnSpec:
    """Spec of a tensor column: device, dtype and shape of its values.

    A jagged column also has its number of rows and its ragged dimension.
    """

    device: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    jagged_rows: int = 0
    ragged: int | None = None

    def parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Return (dtype, shape) of the values and, of a jagged column, of the offsets."""
        values = (self.dtype, self.shape)
        return [values] if self.ragged is None else [values, (torch.int64, (self.jagged_rows + 1,))]

    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.ragged is None:
            return parts[0]
        return torch.nested.nested_tensor_from_jagged(parts[0], parts[1], jagged_dim=self.ragged)

    def without_rows(self) -> torch.Tensor:
        """Return an empty tensor of this spec."""
        along = 0 if self.ragged is None else self.ragged - 1
        empty = replace(self, shape=(*self.shape[:along], 0, *self.shape[along + 1 :]), jagged_rows=0)
        return empty.assemble([torch.zeros(shape, dtype=dtype) for dtype, shape in empty.parts()])


@dataclass(frozen=True)
class _RankColumns:
    num_rows: int
    specs: dict[str, _ColumnSpec]
    arrays: dict[str, np.ndarray]


def all_gather_columns(
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    *,
    num_rows: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], int]:
    """Return (tensor columns, array columns, number of rows) of all ranks of the group together.

    See `all_gather_data_proto`.
    """
    all_ranks: list[Any] = [None] * dist.get_world_size(group)
    specs = {name: _column_spec(tensor) for name, tensor in tensors.items()}
    dist.all_gather_object(all_ranks, _RankColumns(num_rows, specs, dict(arrays)), group=group)
    ranks_with_rows = [rank for rank, one in enumerate(all_ranks) if one.num_rows] or _first_with_columns(all_ranks)
    all_arrays = concat_columns([all_ranks[rank].arrays for rank in ranks_with_rows])
    concat_columns(
        [{name: spec.without_rows() for name, spec in all_ranks[rank].specs.items()} for rank in ranks_with_rows]
    )
    gathered: dict[str, list[torch.Tensor]] = {}
    for name in all_ranks[ranks_with_rows[0]].specs:
        own = _parts(tensors[name]) if dist.get_rank(group) in ranks_with_rows else ()
        gathered[name] = _all_gather_column(own, {rank: all_ranks[rank].specs[name] for rank in ranks_with_rows}, group)
        if name in tensors:
            gathered[name] = [part.to(tensors[name].device) for part in gathered[name]]
    all_tensors = concat_columns(
        [{name: parts[i] for name, parts in gathered.items()} for i in range(len(ranks_with_rows))]
    )
    return all_tensors, all_arrays, sum(one.num_rows for one in all_ranks)


def _first_with_columns(all_ranks: Sequence[_RankColumns]) -> list[int]:
    return [next((rank for rank, one in enumerate(all_ranks) if one.specs or one.arrays), 0)]


def _column_spec(tensor: torch.Tensor) -> _ColumnSpec:
    if not tensor.is_nested:
        return _ColumnSpec(tensor.device.type, tensor.dtype, tuple(tensor.shape))
    return _ColumnSpec(
        tensor.device.type, tensor.dtype, tuple(without_holes(tensor).values().shape), len(tensor), jagged_dim(tensor)
    )


def _parts(tensor: torch.Tensor) -> Parts:
    """Return the dense tensors of a column, in the order of `_ColumnSpec.parts`."""
    tensor = without_holes(tensor.detach()) if tensor.is_nested else tensor
    return (tensor.values(), jagged_offsets(tensor).to(torch.int64)) if tensor.is_nested else (tensor,)


def _all_gather_column(
    own: Parts, specs: dict[int, _ColumnSpec], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return the column of each rank that has rows, in rank order.

    A rank without rows takes part with empty `own`.
    """
    gathered: dict[int, list[torch.Tensor]] = {rank: [] for rank in specs}
    for number in range(len(next(iter(specs.values())).parts())):
        kinds = {rank: spec.parts()[number] for rank, spec in specs.items()}
        sizes = {rank: torch.Size(shape).numel() * dtype.itemsize for rank, (dtype, shape) in kinds.items()}
        device = _common_device([spec.device for spec in specs.values()], str(dist.get_backend_config(group)))
        received = _all_gather_bytes(own[number] if own else None, max(sizes.values()), device, group)
        for rank, (dtype, shape) in kinds.items():
            gathered[rank].append(received[rank][: sizes[rank]].view(dtype).reshape(shape))
    return [spec.assemble(gathered[rank]) for rank, spec in specs.items()]


def _common_device(devices: Sequence[str], backends: str) -> torch.device:
    """Return the device for a column's transfer, the same on every rank.

    NCCL transfers only CUDA memory.
    """
    if "nccl" in backends and ("gloo" not in backends or "cuda" in devices):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _all_gather_bytes(
    tensor: torch.Tensor | None, num_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return (num_bytes,) uint8 of every rank, each starting with that rank's tensor."""
    padded = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if tensor is not None:
        padded[: tensor.nbytes] = flat_bytes(tensor.to(device))
    received = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    if num_bytes:
        dist.all_gather(received, padded, group=group)
    return received
