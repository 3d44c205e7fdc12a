"""Serialize batches: pickle 5 with out-of-band buffers, and plain-data files.

Between processes every tensor is one `pickle.PickleBuffer` over its own bytes. Ray writes it to shared memory once and
readers map it; nothing is encoded. On disk the same tuples are written in band. The pickler refuses everything but
plain data, and the unpickler can construct nothing else. `batch.py` calls this module.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar, cast

import numpy as np
import torch

from hybridrl.data_plane.columns import jagged_dim, jagged_offsets, private_copy, without_holes
from hybridrl.data_plane.conversion import TensorDict
from hybridrl.data_plane.futures import StoredArray
from hybridrl.data_plane.meta_info import GenerationRequest, Record, UpdatePlan
from hybridrl.errors import DataError, reason_of
from hybridrl.system.atomic_write import atomic_write

# (dtype name, shape, bytes) of a dense tensor, or (values, offsets, ragged dimension) of a jagged one, the first two
# encoded as dense tensors.
EncodedTensor = tuple[Any, Any, Any]
EncodedColumns = dict[str, EncodedTensor]
Wrap = Callable[[Any], Any]  # of a numpy array
T = TypeVar("T")

# torch dtypes that numpy has under the same name.
NUMPY_DTYPES = {"float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"}

FILE_KIND = "hybridrl.DataProto"
FILE_VERSION = 1


def serialize_single_tensor(tensor: torch.Tensor, *, wrap: Wrap = pickle.PickleBuffer) -> EncodedTensor:
    """Return a tensor of any dtype and device as a picklable tuple, without gradient history.

    Args:
        wrap: Makes the bytes, a (nbytes,) uint8 array, picklable. The default is zero-copy and needs pickle protocol 5.
    """
    if tensor.is_nested:
        tensor = without_holes(tensor.detach())
        values, offsets = (
            serialize_single_tensor(part, wrap=wrap) for part in (tensor.values(), jagged_offsets(tensor))
        )
        return values, offsets, jagged_dim(tensor)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), wrap(flat_bytes(tensor.cpu()).numpy())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's values as (nbytes,) uint8.

    It shares the tensor's memory where that is contiguous and resolved.
    """
    resolved = tensor.detach().resolve_conj().resolve_neg()  # conj and neg views are lazy flags
    return resolved.contiguous().reshape(-1).view(torch.uint8)


def deserialize_single_tensor(encoded: EncodedTensor) -> torch.Tensor:
    """Return the CPU tensor of `serialize_single_tensor`, which may be written to.

    It shares the encoded bytes unless they are read-only.
    """
    return private_copy(tensor_from_buffer(encoded)) if is_read_only(encoded) else tensor_from_buffer(encoded)


def tensor_from_buffer(encoded: EncodedTensor) -> torch.Tensor:
    """Return the CPU tensor over the encoded bytes themselves.

    It must not be written to if `is_read_only(encoded)`.
    """
    first, second, third = encoded
    if not isinstance(first, str):
        return torch.nested.nested_tensor_from_jagged(
            tensor_from_buffer(first), tensor_from_buffer(second), jagged_dim=third
        )
    # DLPack, because torch's frombuffer and from_numpy warn about read-only memory.
    if first in NUMPY_DTYPES:
        return torch.from_dlpack(np.frombuffer(third, dtype=first).reshape(second))
    return torch.from_dlpack(np.frombuffer(third, dtype=np.uint8)).view(getattr(torch, first)).reshape(second)


def is_read_only(encoded: EncodedTensor) -> bool:
    """Return whether the encoded bytes are read-only.

    Ray's shared memory and immutable bytes objects are.
    """
    first, second, third = encoded
    return memoryview(third).readonly if isinstance(first, str) else is_read_only(first) or is_read_only(second)


def serialize_tensordict(
    batch: TensorDict, *, protocol: int = 5, read_only: Iterable[str] = ()
) -> tuple[int, EncodedColumns]:
    """Return (rows, encoded columns).

    Columns named in `read_only` stay read-only in the receiving process.
    """
    plain, read_only_wrap = (pickle.PickleBuffer, _read_only_buffer) if protocol >= 5 else (bytearray, bytearray)
    read_only_names = set(read_only)
    tensors = cast(dict[str, torch.Tensor], dict(batch.items()))
    columns = {
        k: serialize_single_tensor(v, wrap=read_only_wrap if k in read_only_names else plain)
        for k, v in tensors.items()
    }
    return batch.batch_size[0], columns


def _read_only_buffer(array: np.ndarray) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(array.data.toreadonly())


def deserialize_tensordict(encoded: tuple[int, EncodedColumns]) -> TensorDict:
    """Return the TensorDict of `serialize_tensordict`, on the CPU, whose columns may be written to."""
    num_rows, columns = encoded
    return TensorDict(
        {name: deserialize_single_tensor(column) for name, column in columns.items()}, batch_size=[num_rows]
    )


def columns_from_buffer(num_rows: int, columns: EncodedColumns) -> tuple[TensorDict, set[str]]:
    """Return the columns over the encoded bytes, and the names of the read-only ones.

    Copy a read-only column before writing to it.
    """
    tensors = {name: tensor_from_buffer(encoded) for name, encoded in columns.items()}
    return TensorDict(tensors, batch_size=[num_rows]), {
        name for name, encoded in columns.items() if is_read_only(encoded)
    }


def contiguous_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays that numpy pickles out of band, which requires contiguous ones.

    Object arrays are pickled in band in any case.
    """
    return {name: array if array.dtype == object else np.ascontiguousarray(array) for name, array in arrays.items()}


def writable_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays that may be written to.

    Read-only ones are copied; they have a few bytes per row.
    """
    return {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}


def _plain_dtype(code: str, *_: Any) -> np.dtype:
    """Return the dtype with this code, one that may be given a state."""
    found = np.dtype(str(code), copy=True)
    if found.kind == "V" or not found.itemsize:
        raise DataError(f"numpy.dtype({code!r}) is not plain data; a batch file holds no arrays with fields")
    return found


# Everything a file may name: constructors of plain data without side effects, each with what stands for it.
PLAIN_DATA: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): "ndarray",  # it is an argument only; called, it would allocate an array of any size
    ("numpy", "dtype"): _plain_dtype,
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: np.empty(0, np.int8),
    ("numpy._core.multiarray", "scalar"): None,  # None: itself
    ("numpy._core.numeric", "_frombuffer"): None,
    ("builtins", "complex"): None,
    ("builtins", "range"): None,
    ("builtins", "slice"): None,
    ("collections", "OrderedDict"): None,
    ("datetime", "date"): None,
    ("datetime", "datetime"): None,
    ("datetime", "timedelta"): None,
    (__name__, deserialize_single_tensor.__name__): None,
    **dict.fromkeys((record.__module__, record.__name__) for record in (GenerationRequest, UpdatePlan)),
}


class _PlainPickler(pickle.Pickler):
    """Pickler that refuses what the unpickler would refuse."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return deserialize_single_tensor, (serialize_single_tensor(value, wrap=bytearray),)
        if isinstance(value, StoredArray):
            return value.read().__reduce_ex__(5)
        if isinstance(value, np.dtype):
            _plain_dtype(value.str)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            _check_plain(value.__module__, value.__qualname__)
        return NotImplemented


PythonUnpickler: Any = pickle._Unpickler  # its methods have no types


class _PlainUnpickler(PythonUnpickler):
    """Unpickler in Python: C's allocates as many entries of its memo as a file of 12 bytes says."""

    def find_class(self, module: str, name: str) -> Any:
        _check_plain(module, name)
        return PLAIN_DATA[module, name] or super().find_class(module, name)

    def load_build(self) -> None:
        """Set the state of an object, if it is one that this library writes.

        Both are the last two of the stack.
        """
        filled, state = self.stack[-2:]
        if not (isinstance(filled, Record) or _is_new_array(filled) or _is_state_of_dtype(filled, state)):
            raise DataError(f"the state of a {type(filled).__name__} is not plain data")
        super().load_build()

    def load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))  # no more than the file has

    dispatch = PythonUnpickler.dispatch | {pickle.BUILD[0]: load_build, pickle.BYTEARRAY8[0]: load_bytearray8}


def _is_new_array(value: Any) -> bool:
    """Return whether numpy may fill this array: one that is filled may share its memory with others."""
    return isinstance(value, np.ndarray) and not value.size


def _is_state_of_dtype(value: Any, state: Any) -> bool:
    """Return whether a state changes byte order and unit only.

    numpy checks nothing of it, so that it might name fields outside of the array.
    """
    if not isinstance(value, np.dtype) or len(state) != (9 if value.kind in "mM" else 8) or state[0] != len(state) - 5:
        return False
    layout = zip(state[5:8], (value.itemsize, value.alignment, value.flags), strict=True)
    return all(one is None for one in state[2:5]) and all(one in (-1, other) for one, other in layout)


def _check_plain(module: str, name: str) -> None:
    if (module, name) not in PLAIN_DATA:
        raise DataError(
            f"{module}.{name} is not plain data; a batch file holds tensors, arrays, numbers, strings and "
            "dates, in lists, tuples and dicts"
        )


def save_plain(path: str | os.PathLike, content: tuple) -> None:
    """Write a tuple of plain data to a file, atomically.

    Raises:
        DataError: A value is not plain data; the message names its type.
    """
    with atomic_write(path, "wb") as file:
        _PlainPickler(file, protocol=5).dump((FILE_KIND, FILE_VERSION, *content))


def load_plain(path: str | os.PathLike, make: Callable[..., T]) -> T:
    """Return `make(*content)` of what `save_plain` wrote. The file cannot execute code.

    Raises:
        DataError: It is not such a file, or damaged; the message names the path.
    """
    with open(path, "rb") as file:
        try:
            kind, version, *content = _PlainUnpickler(file).load()
            if (kind, version) == (FILE_KIND, FILE_VERSION):
                return make(*content)
        except Exception as error:  # a damaged file raises any of a dozen types
            raise DataError(f"{path} is not a batch file or is damaged: {reason_of(error):.300}") from error
    raise DataError(f"{path} is a {kind} file of version {version}, not {FILE_KIND} of version {FILE_VERSION}")
