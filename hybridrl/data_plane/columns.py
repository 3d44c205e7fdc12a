"""Operations on one column: slice, select, join and compare rows.

A column is a dense tensor, a jagged nested tensor or a numpy array whose first dimension counts rows. Batches of
several columns are in `batch.py`, bytes in `serialization.py`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from hybridrl.data_plane.futures import array_of
from hybridrl.errors import DataError

Column = torch.Tensor | np.ndarray
C = TypeVar("C", torch.Tensor, np.ndarray, Column)  # the result is of the argument's kind
RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def check_tensor_column(name: Any, tensor: Any) -> None:
    """Check that rows can be selected from a tensor column.

    Raises:
        TypeError: It is not a tensor, or its name is not a string.
        DataError: Its layout is sparse or strided nested, or it has no row dimension.
    """
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"batch column {name!r} is {type(tensor).__name__}; batch columns are tensors under string names"
        )
    if tensor.is_nested and tensor.layout != torch.jagged:
        raise DataError(
            f"batch column {name!r} is a nested tensor of layout {tensor.layout}; build it with layout=torch.jagged"
        )
    if tensor.layout not in (torch.strided, torch.jagged):
        raise DataError(f"batch column {name!r} has layout {tensor.layout}; use .to_dense() first")
    if tensor.dim() == 0:
        raise DataError(
            f"batch column {name!r} has no row dimension; a number that belongs to the whole batch goes to meta_info"
        )


def check_array_column(name: Any, array: Any, num_rows: int) -> None:
    """Check that a column is an array of `num_rows` rows.

    Raises:
        TypeError: It is not an array, or its name is not a string.
        DataError: It has another number of rows.
    """
    if not isinstance(name, str) or not isinstance(array, np.ndarray):
        raise TypeError(
            f"non_tensor_batch column {name!r} is {type(array).__name__}; these columns are numpy arrays "
            "under string names"
        )
    if array.ndim == 0 or len(array) != num_rows:
        size = len(array) if array.ndim else "no"
        raise DataError(f"non_tensor_batch column {name!r} has {size} rows, the batch has {num_rows}")


def object_array(values: Any) -> np.ndarray:
    """Return values as an object array, one row per entry.

    Entries whose inner shapes differ become one object each.
    """
    try:
        return np.array(values, dtype=object)
    except ValueError:
        return one_object_per_row(values)


def one_object_per_row(values: Sequence) -> np.ndarray:
    """Return a flat object array of the unchanged values."""
    return np.fromiter(values, dtype=object, count=len(values))


def row_index(rows: RowIndex, num_rows: int) -> torch.Tensor:
    """Return the selected rows as (K,) int64 in [0, num_rows).

    Args:
        rows: Row numbers (negative ones count from the end) or a mask.

    Raises:
        TypeError: The dtype is neither int nor bool.
        DataError: The mask has another length, or the index more than one dimension.
        IndexError: A row does not exist.
    """
    index = np.asarray(rows.detach().cpu() if isinstance(rows, torch.Tensor) else rows)
    if index.ndim != 1:
        raise DataError(f"rows are selected by a flat list of numbers or a mask, got an index of shape {index.shape}")
    if index.dtype == bool:
        if len(index) != num_rows:
            raise DataError(f"the mask has {len(index)} entries, the batch has {num_rows} rows")
        return torch.from_numpy(np.flatnonzero(index))
    if not len(index):
        return torch.zeros(0, dtype=torch.int64)
    if index.dtype.kind not in "iu":
        raise TypeError(f"rows are selected by integers or booleans, got {index.dtype}")
    outside = index[(index < -num_rows) | (index >= num_rows)]
    if len(outside):
        raise IndexError(f"row {outside[0]} is not in a batch of {num_rows} rows")
    return torch.from_numpy(index.astype(np.int64) % num_rows)


def take_rows(column: C, rows: torch.Tensor) -> C:
    """Return a copy of the given rows, in that order; `rows` comes from `row_index`."""
    if isinstance(column, np.ndarray):
        return column[rows.numpy()]
    if column.is_nested:
        return _take_jagged(column, rows.to(column.device))
    return column.index_select(0, rows.to(column.device))


def slice_rows(column: C, start: int, stop: int) -> C:
    """Return rows [start, stop) as a view.

    Of a jagged tensor it is a copy, because torch has no such view.
    """
    if isinstance(column, torch.Tensor) and column.is_nested:
        return take_rows(column, torch.arange(start, stop))
    return column[start:stop]


def without_holes(jagged: torch.Tensor) -> torch.Tensor:
    """Return a jagged tensor whose values are exactly its rows.

    A narrowed one also holds the values outside the narrowed ranges.
    """
    lengths = jagged.lengths()  # type: ignore[attr-defined] # torch declares it on a private subclass
    return jagged if lengths is None else jagged.contiguous()


def jagged_offsets(jagged: torch.Tensor) -> torch.Tensor:
    """Return where the rows of a jagged tensor of B rows begin and end, (B + 1,) int64."""
    return jagged.offsets()  # type: ignore[attr-defined] # torch declares it on a private subclass


def jagged_dim(jagged: torch.Tensor) -> int:
    """Return which dimension of a jagged tensor is ragged; its shape does not determine it."""
    return jagged._ragged_idx  # type: ignore[attr-defined] # torch has no public name for it


def _jagged_row(jagged: torch.Tensor) -> str:
    """Describe a row: `jagged (4, *)` has 4 values for each of any number of tokens."""
    sizes: list[Any] = list(jagged.values().shape)
    sizes[jagged_dim(jagged) - 1] = "*"
    return f"jagged ({', '.join(map(str, sizes))})"


def _take_jagged(jagged: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    jagged = without_holes(jagged)
    lengths = jagged_offsets(jagged).diff()[rows]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shift = jagged_offsets(jagged)[:-1][rows] - offsets[:-1]
    positions = torch.arange(int(offsets[-1]), device=rows.device) + shift.repeat_interleave(lengths)
    ragged = jagged_dim(jagged)
    values = jagged.values().index_select(ragged - 1, positions)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


def concat_rows(name: str, parts: Sequence[C]) -> C:
    """Return the rows of all parts, copied.

    Raises:
        DataError: Dtypes or row shapes differ; the message names the column.
    """
    if isinstance(parts[0], np.ndarray):
        return _concat_arrays(name, parts)
    return _concat_tensors(name, parts)


def _concat_tensors(name: str, parts: Sequence[Any]) -> torch.Tensor:
    kinds = [(p.dtype, _jagged_row(p) if p.is_nested else p.shape[1:]) for p in parts]
    for number, kind in enumerate(kinds):
        # torch.cat would promote: int64 with float32 silently loses digits.
        if kind != kinds[0]:
            first, other = (
                f"{dtype} {shape if isinstance(shape, str) else tuple(shape)}" for dtype, shape in (kinds[0], kind)
            )
            raise DataError(
                f"column {name!r} cannot be concatenated: rows of part 0 are {first}, of part {number} "
                f"{other}; pad or cast them first"
            )
    return _concat_jagged(parts) if parts[0].is_nested else torch.cat(list(parts))


def _concat_arrays(name: str, parts: Sequence[Any]) -> np.ndarray:
    if any(p.dtype == object for p in parts) and len({p.shape[1:] for p in parts}) > 1:
        # Lists of equal length make a two-dimensional object array, others a flat one. Parts may differ in this.
        parts = [one_object_per_row([row.tolist() if isinstance(row, np.ndarray) else row for row in p]) for p in parts]
    try:
        return np.concatenate(parts)
    except (ValueError, TypeError) as error:
        raise DataError(f"column {name!r} cannot be concatenated: {error}") from None


def _concat_jagged(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [without_holes(p) for p in parts]
    ragged = jagged_dim(parts[0])
    lengths = torch.cat([jagged_offsets(p).diff() for p in parts])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = torch.cat([p.values() for p in parts], dim=ragged - 1)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


def num_bytes(column: Column) -> int:
    """Return the size of a column's own values in bytes; object arrays count only references."""
    if isinstance(column, torch.Tensor) and column.is_nested:
        column = column.values()
    return column.nbytes


def deep_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal, compared recursively.

    NaN equals NaN, 1 equals 1.0 as in Python, and a tensor never equals an array. Complex numbers are compared part by
    part, so a NaN in one part does not hide a difference in the other.
    """
    a, b = array_of(a), array_of(b)
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _equal_tensors(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _equal_arrays(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(deep_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(deep_equal, a, b))
    if isinstance(a, complex) and isinstance(b, complex):
        return deep_equal(a.real, b.real) and deep_equal(a.imag, b.imag)
    return bool(a == b) or bool(a != a and b != b)


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        a, b = without_holes(a), without_holes(b)
        same_rows = jagged_dim(a) == jagged_dim(b) and _equal_tensors(jagged_offsets(a), jagged_offsets(b))
        return same_rows and _equal_tensors(a.values(), b.values())
    if a.shape != b.shape:
        return False
    b = b.to(a.device)
    if a.is_complex():
        return _equal_tensors(a.real, b.real) and _equal_tensors(a.imag, b.imag)
    return torch.equal(a, b) or bool(((a == b) | (a != a) & (b != b)).all())


def _equal_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype == object or b.dtype == object:
        return all(map(deep_equal, a.flat, b.flat))
    if a.dtype.kind == b.dtype.kind == "c":
        return _equal_arrays(a.real, b.real) and _equal_arrays(a.imag, b.imag)
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")


def split_across_columns(name: str, column: C, parts: int) -> C:
    """Return (B * parts, W / parts, ...) of a column (B, W, ...).

    The `parts` parts of a row are in adjacent rows.

    Raises:
        DataError: The second dimension does not divide.
    """
    if parts < 1:
        raise ValueError(f"column {name!r}: parts={parts} must be at least 1")
    nested = isinstance(column, torch.Tensor) and column.is_nested
    if nested or column.ndim < 2 or column.shape[1] % parts:
        shape = "jagged" if nested else tuple(column.shape)
        raise DataError(
            f"the second dimension of column {name!r}, which is {shape}, cannot be split into {parts} equal parts"
        )
    return column.reshape(len(column) * parts, column.shape[1] // parts, *column.shape[2:])


def private_copy(column: torch.Tensor) -> torch.Tensor:
    """Return a copy of a received column.

    numpy allocates it, because it asks the kernel for huge pages: page faults dominate the cost of copying.
    """
    if column.is_nested:
        # clone() would not copy the offsets.
        values, offsets = private_copy(column.values()), private_copy(jagged_offsets(column))
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=jagged_dim(column))
    if not column.nbytes:
        return column.clone()
    copy = torch.from_numpy(np.empty(column.nbytes, dtype=np.uint8))
    copy.copy_(column.reshape(-1).view(torch.uint8))
    return copy.view(column.dtype).view(column.shape)
