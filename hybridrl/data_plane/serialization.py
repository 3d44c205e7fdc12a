"""A batch as bytes: pickle 5 with out-of-band buffers between processes, and a plain-data file on disk.

Between processes every tensor is one `pickle.PickleBuffer` over its own bytes, so that Ray writes it to shared memory
once and readers map it; nothing is encoded. On disk the same tuples are written in band, by a pickler that refuses
everything but plain data and read by an unpickler that can call nothing else. What a batch is, `protocol.py` knows.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridrl.data_plane.columns import jagged_dim, without_holes
from hybridrl.data_plane.sharing import own_copy
from hybridrl.errors import DataError

# (dtype name, shape, bytes) of a dense tensor; (values, offsets, ragged dimension) of a jagged one, its first two again
# such tuples.
EncodedTensor = tuple[Any, Any, Any]
EncodedColumns = dict[str, EncodedTensor]
Wrap = Callable[[np.ndarray], Any]

NUMPY_DTYPES = {
    "float32",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
}  # those that numpy has too, by the same name

FILE_KIND = "hybridrl.DataProto"
FILE_VERSION = 1


def serialize_single_tensor(tensor: torch.Tensor, *, wrap: Wrap = pickle.PickleBuffer) -> EncodedTensor:
    """Return a tensor of any dtype and device as a picklable tuple, without its gradient history.

    wrap: makes the bytes, given as a (nbytes,) uint8 array, picklable; the default is zero-copy and needs pickle
    protocol 5.
    """
    if tensor.is_nested:
        tensor = without_holes(tensor.detach())
        values, offsets = (serialize_single_tensor(part, wrap=wrap) for part in (tensor.values(), tensor.offsets()))
        return values, offsets, jagged_dim(tensor)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), wrap(flat_bytes(tensor.cpu()).numpy())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's values as (nbytes,) uint8, over its own memory where that holds them in order and as they
    are.
    """
    as_they_are = (
        tensor.detach().resolve_conj().resolve_neg()
    )  # a conjugated or negated view is so only in torch's books
    return as_they_are.contiguous().reshape(-1).view(torch.uint8)


def deserialize_single_tensor(encoded: EncodedTensor) -> torch.Tensor:
    """Return the CPU tensor of `serialize_single_tensor`, which may be written to: over the encoded bytes unless they
    are read-only.
    """
    return own_copy(tensor_over(encoded)) if is_read_only(encoded) else tensor_over(encoded)


def tensor_over(encoded: EncodedTensor) -> torch.Tensor:
    """Return the CPU tensor over the encoded bytes themselves: it must not be written to if `is_read_only(encoded)`."""
    first, second, third = encoded
    if not isinstance(first, str):
        return torch.nested.nested_tensor_from_jagged(tensor_over(first), tensor_over(second), jagged_dim=third)
    # DLPack, because frombuffer and from_numpy warn about read-only memory, once, wherever it happens to be first.
    if first in NUMPY_DTYPES:
        return torch.from_dlpack(np.frombuffer(third, dtype=first).reshape(second))
    return torch.from_dlpack(np.frombuffer(third, dtype=np.uint8)).view(getattr(torch, first)).reshape(second)


def is_read_only(encoded: EncodedTensor) -> bool:
    """Return whether the bytes belong to somebody else: Ray's shared memory, or an immutable bytes object."""
    first, second, third = encoded
    return memoryview(third).readonly if isinstance(first, str) else is_read_only(first) or is_read_only(second)


def serialize_tensordict(
    batch: TensorDict, *, protocol: int = 5, read_only: Iterable[str] = ()
) -> tuple[int, EncodedColumns]:
    """Return (rows, encoded columns).

    Columns named in `read_only` are marked so that they stay read-only wherever they arrive.
    """
    plain, guarded = (pickle.PickleBuffer, _read_only_buffer) if protocol >= 5 else (bytearray, bytearray)
    guards = set(read_only)
    columns = {k: serialize_single_tensor(v, wrap=guarded if k in guards else plain) for k, v in batch.items()}
    return batch.batch_size[0], columns


def _read_only_buffer(array: np.ndarray) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(memoryview(array).toreadonly())


def deserialize_tensordict(encoded: tuple[int, EncodedColumns]) -> TensorDict:
    """Return the TensorDict of `serialize_tensordict`, on the CPU, whose columns may be written to."""
    num_rows, columns = encoded
    return TensorDict(
        {name: deserialize_single_tensor(column) for name, column in columns.items()}, batch_size=[num_rows]
    )


def columns_over(num_rows: int, columns: EncodedColumns) -> tuple[TensorDict, set[str]]:
    """Return the columns over the encoded bytes themselves, and the names of those that must be copied before they are
    written to.
    """
    tensors = {name: tensor_over(encoded) for name, encoded in columns.items()}
    return TensorDict(tensors, batch_size=[num_rows]), {
        name for name, encoded in columns.items() if is_read_only(encoded)
    }


def contiguous_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays that numpy pickles out of band: it sends only contiguous ones so.

    Object arrays travel in band anyway.
    """
    return {name: array if array.dtype == object else np.ascontiguousarray(array) for name, array in arrays.items()}


def writable_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays that may be written to; those over somebody else's memory are copied (they are a few bytes per
    row).
    """
    return {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}


# Everything a file may name: constructors of plain data, which do nothing but construct.
PLAIN_DATA = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("builtins", "complex"),
    ("builtins", "range"),
    ("builtins", "slice"),
    ("collections", "OrderedDict"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    (__name__, deserialize_single_tensor.__name__),
}


class _PlainPickler(pickle.Pickler):
    """Refuses on writing what would be refused on reading."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return deserialize_single_tensor, (serialize_single_tensor(value, wrap=bytearray),)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            _check_plain(value.__module__, value.__qualname__)
        return NotImplemented


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        _check_plain(module, name)
        return super().find_class(module, name)


def _check_plain(module: str, name: str) -> None:
    if (module, name) not in PLAIN_DATA:
        raise DataError(
            f"{module}.{name} is not plain data; a batch file holds tensors, arrays, numbers, strings and "
            "dates, in lists, tuples and dicts"
        )


def save_plain(path: str | os.PathLike, content: tuple) -> None:
    """Write a tuple of plain data to a file that appears whole or not at all.

    Raises DataError naming what is not plain data.
    """
    target = Path(path)
    aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with open(aside, "wb") as file:
            _PlainPickler(file, protocol=5).dump((FILE_KIND, FILE_VERSION, *content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def load_plain(path: str | os.PathLike) -> tuple:
    """Return what `save_plain` wrote.

    No code runs on the file's behalf; anything but such a file is a DataError naming the path.
    """
    with open(path, "rb") as file:
        try:
            kind, version, *content = _PlainUnpickler(file).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            DataError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
        ) as error:
            raise DataError(f"{path} is not a batch file or is damaged: {error}") from error
    if (kind, version) != (FILE_KIND, FILE_VERSION):
        raise DataError(f"{path} is a {kind} file of version {version}, not {FILE_KIND} of version {FILE_VERSION}")
    return tuple(content)
