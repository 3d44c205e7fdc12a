"""Convert a batch: to one TensorDict that also holds non-tensors, and to text."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridrl.data_plane.columns import num_bytes, one_object_per_row
from hybridrl.errors import DataError


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Let tensordict be imported without torch's compiler, which takes 2 s of CPU in every process.

    It marks two functions for the compiler, which loads it. The marks matter to compiled code that copies or locks a
    TensorDict, and there is none here.
    """
    marks = {name: getattr(torch.compiler, name) for name in ("allow_in_graph", "assume_constant_result")}
    for name in marks:
        setattr(torch.compiler, name, lambda function: function)
    try:
        yield
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)


with _without_compiler():
    from tensordict import NonTensorData as NonTensorData
    from tensordict import NonTensorStack as NonTensorStack
    from tensordict import TensorDict as TensorDict

Parts = tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]


def non_tensor_stack(values: Iterable[Any]) -> NonTensorStack:
    """Return the TensorDict column of these values, one per row."""
    return NonTensorStack(*[NonTensorData(value) for value in values])


def plain_value(entry: Any) -> Any:
    """Return an entry of a TensorDict unwrapped.

    A tensor stays a tensor, a column becomes a list, and a value of the whole batch loses its wrapper.
    """
    if isinstance(entry, NonTensorStack):
        return entry.tolist()
    return entry.data if isinstance(entry, NonTensorData) else entry


def split_tensordict(tensor_dict: TensorDict) -> Parts:
    """Return (tensor columns, other columns, meta information).

    `NonTensorStack` entries are columns, `NonTensorData` entries meta information.
    """
    arrays = {name: column_array(v.tolist()) for name, v in tensor_dict.items() if isinstance(v, NonTensorStack)}
    meta_info = {name: v.data for name, v in tensor_dict.items() if isinstance(v, NonTensorData)}
    tensors = {name: v for name, v in tensor_dict.items() if name not in arrays and name not in meta_info}
    return tensors, arrays, meta_info


def column_array(values: Sequence) -> np.ndarray:
    """Return the array column of these rows.

    numpy scalars and arrays of one dtype and shape become one array, anything else a flat object array. A column split
    into rows is thus restored: rows of a numeric array are numpy values, and other columns seldom hold such.
    """
    if values and all(isinstance(value, np.generic) for value in values):
        return np.array(values)
    if (
        values
        and all(isinstance(value, np.ndarray) for value in values)
        and len({(v.dtype, v.shape) for v in values}) == 1
    ):
        return np.stack(values)
    return one_object_per_row(values)


def join_tensordict(
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    *,
    num_rows: int,
) -> TensorDict:
    """Return the three parts as one TensorDict, the inverse of `split_tensordict`.

    Raises:
        DataError: A name is used twice.
    """
    twice = sorted({*tensors} & {*arrays} | {*tensors, *arrays} & {*meta_info})
    if twice:
        raise DataError(f"columns and meta_info share the names {twice}; rename or pop them first")
    result = TensorDict(dict(tensors), batch_size=[num_rows])
    for name, array in arrays.items():
        result[name] = non_tensor_stack(array)
    for name, value in meta_info.items():
        result.set_non_tensor(name, value)
    return result


def describe(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]
) -> str:
    """Return a line per column (shape, dtype, device) and per meta_info key (type)."""
    lines = ["batch"]
    lines += [f"  {name}: {tuple(tensor.shape)} ({tensor.dtype}) {tensor.device}" for name, tensor in tensors.items()]
    lines += ["non_tensor_batch"]
    lines += [f"  {name}: ndarray{array.shape} ({array.dtype})" for name, array in arrays.items()]
    lines += ["meta_info"]
    lines += [f"  {name}: {_type_name(value)}" for name, value in meta_info.items()]
    return "\n".join(lines)


def _type_name(value: Any) -> str:
    """Return the type with its contents, judged by the first entry: `list[int]`, `dict[str: float]`."""
    if isinstance(value, list | tuple) and value:
        return f"{type(value).__name__}[{_type_name(value[0])}]"
    if isinstance(value, dict) and value:
        key, entry = next(iter(value.items()))
        return f"dict[{type(key).__name__}: {_type_name(entry)}]"
    return type(value).__name__


def size_report(tensors: Iterable[torch.Tensor], arrays: Iterable[np.ndarray]) -> str:
    """Return the sizes of both kinds of columns in GiB; object columns count as references."""
    gib = [sum(map(num_bytes, columns)) / 1024**3 for columns in (tensors, arrays)]
    return f"Size of tensordict: {gib[0]:.6f} GB, size of non_tensor_batch: {gib[1]:.6f} GB"
