"""Columns of all ranks on every rank, over a torch process group: for code that runs inside one group of workers.

Every rank first announces what it holds, so that a mismatch is raised everywhere, before anybody waits for tensors that
never come. Tensors then travel as bytes, padded to the largest rank's: any dtype, any number of rows per rank, any
backend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.data_plane.columns import jagged_dim, without_holes
from hybridrl.data_plane.merging import concat_columns
from hybridrl.data_plane.serialization import flat_bytes

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Layout:
    """A tensor column announced: device, dtype and shape of its values, and, of a jagged one, number of rows and ragged
    dimension.
    """

    device: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    jagged_rows: int = 0
    ragged: int | None = None

    def parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """What travels: (dtype, shape) of the values and, of a jagged column, of the offsets."""
        values = (self.dtype, self.shape)
        return [values] if self.ragged is None else [values, (torch.int64, (self.jagged_rows + 1,))]

    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.ragged is None:
            return parts[0]
        return torch.nested.nested_tensor_from_jagged(parts[0], parts[1], jagged_dim=self.ragged)

    def without_rows(self) -> torch.Tensor:
        """A tensor of this kind that holds nothing."""
        along = 0 if self.ragged is None else self.ragged - 1
        empty = replace(self, shape=(*self.shape[:along], 0, *self.shape[along + 1 :]), jagged_rows=0)
        return empty.assemble([torch.zeros(shape, dtype=dtype) for dtype, shape in empty.parts()])


@dataclass(frozen=True)
class _Announcement:
    num_rows: int
    layouts: dict[str, _Layout]
    arrays: dict[str, np.ndarray]


def all_gather_columns(
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    *,
    num_rows: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], int]:
    """Return (tensor columns, array columns, rows) of all ranks of the group together, as `all_gather_data_proto`
    (reshaping.py) says.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    layouts = {name: _layout(tensor) for name, tensor in tensors.items()}
    dist.all_gather_object(everyone, _Announcement(num_rows, layouts, dict(arrays)), group=group)
    holders = [rank for rank, one in enumerate(everyone) if one.num_rows] or _first_with_columns(everyone)
    all_arrays = concat_columns([everyone[rank].arrays for rank in holders])
    concat_columns(
        [{name: layout.without_rows() for name, layout in everyone[rank].layouts.items()} for rank in holders]
    )
    gathered = {}
    for name in everyone[holders[0]].layouts:
        own = _parts(tensors[name]) if dist.get_rank(group) in holders else ()
        gathered[name] = _all_gather_column(own, {rank: everyone[rank].layouts[name] for rank in holders}, group)
        if name in tensors:
            gathered[name] = [piece.to(tensors[name].device) for piece in gathered[name]]
    all_tensors = concat_columns([{name: pieces[i] for name, pieces in gathered.items()} for i in range(len(holders))])
    return all_tensors, all_arrays, sum(one.num_rows for one in everyone)


def _first_with_columns(everyone: Sequence[_Announcement]) -> list[int]:
    return [next((rank for rank, one in enumerate(everyone) if one.layouts or one.arrays), 0)]


def _layout(tensor: torch.Tensor) -> _Layout:
    if not tensor.is_nested:
        return _Layout(tensor.device.type, tensor.dtype, tuple(tensor.shape))
    return _Layout(
        tensor.device.type, tensor.dtype, tuple(without_holes(tensor).values().shape), len(tensor), jagged_dim(tensor)
    )


def _parts(tensor: torch.Tensor) -> Parts:
    """The dense tensors that make a column, in the order of `_Layout.parts`."""
    tensor = without_holes(tensor.detach()) if tensor.is_nested else tensor
    return (tensor.values(), tensor.offsets().to(torch.int64)) if tensor.is_nested else (tensor,)


def _all_gather_column(own: Parts, layouts: dict[int, _Layout], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the column of each rank that holds rows, in rank order.

    A rank that holds none takes part with empty `own`.
    """
    gathered: dict[int, list[torch.Tensor]] = {rank: [] for rank in layouts}
    for number in range(len(next(iter(layouts.values())).parts())):
        kinds = {rank: layout.parts()[number] for rank, layout in layouts.items()}
        sizes = {rank: torch.Size(shape).numel() * dtype.itemsize for rank, (dtype, shape) in kinds.items()}
        device = _common_device([layout.device for layout in layouts.values()], str(dist.get_backend_config(group)))
        received = _all_gather_bytes(own[number] if own else None, max(sizes.values()), device, group)
        for rank, (dtype, shape) in kinds.items():
            gathered[rank].append(received[rank][: sizes[rank]].view(dtype).reshape(shape))
    return [layout.assemble(gathered[rank]) for rank, layout in layouts.items()]


def _common_device(devices: Sequence[str], backends: str) -> torch.device:
    """The device over which a column travels, by the same reasoning on every rank: NCCL moves nothing
    but CUDA memory.
    """
    if "nccl" in backends and ("gloo" not in backends or "cuda" in devices):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _all_gather_bytes(
    tensor: torch.Tensor | None, num_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return (num_bytes,) uint8 of every rank, which begin with that rank's tensor."""
    padded = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if tensor is not None:
        padded[: tensor.nbytes] = flat_bytes(tensor.to(device))
    received = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    if num_bytes:
        dist.all_gather(received, padded, group=group)
    return received
