"""Split and join batches of either kind: `DataProto`, or a TensorDict with one batch dimension.

Dispatch uses these functions in the driver. This module loads neither torch nor tensordict: a process that has not
loaded them has no batch.
"""

import sys
from collections.abc import Sequence
from typing import Any

from hybridrl import data_plane


def is_batch(value: Any) -> bool:
    """Return whether the value is a `DataProto` or a TensorDict with one batch dimension."""
    return is_data_proto(value) or (_is_tensordict(value) and len(value.batch_size) == 1)


def is_data_proto(value: Any) -> bool:
    """Return whether the value is a `DataProto`."""
    return _is_instance(value, "hybridrl.data_plane.rows", "Rows")


def chunk_rows(batch: Any, parts: int) -> list:
    """Return `parts` batches of consecutive rows whose sizes differ by at most one.

    A batch may be empty and keeps the columns.
    """
    _check(batch)
    if not _is_tensordict(batch):
        return batch.chunk_uneven(parts)
    return data_plane.tensordict_utils.chunk_tensordict(batch, parts)


def concat_batches(batches: Sequence[Any]) -> Any:
    """Return the rows of all batches, copied, in the class of the first.

    See `DataProto.concat`, also for the meta information.

    Raises:
        TypeError: No batch, not a batch, or batches of both kinds.
    """
    if not batches:
        raise TypeError("concatenation needs one or more batches, got none")
    for batch in batches:
        _check(batch)
    if not _is_tensordict(batches[0]):
        return type(batches[0]).concat(batches)
    if not all(map(_is_tensordict, batches)):
        raise TypeError(f"concatenation needs batches of one kind, got {[type(batch).__name__ for batch in batches]}")
    meta = data_plane.merging.merge_meta_info(data_plane.tensordict_utils.meta_of(batch) for batch in batches)
    return data_plane.tensordict_utils.concat_with_meta(batches, meta)


def size_in_bytes(batch: Any) -> int:
    """Return the size of the tensor columns."""
    return batch.bytes() if _is_tensordict(batch) else batch.nbytes


def _check(batch: Any) -> None:
    if not is_batch(batch):
        shape = f" of batch_size {tuple(batch.batch_size)}" if _is_tensordict(batch) else ""
        raise TypeError(
            f"a batch is a DataProto or a TensorDict with one batch dimension, got {type(batch).__name__}{shape}"
        )


def _is_tensordict(value: Any) -> bool:
    return _is_instance(value, "tensordict", "TensorDict")


def _is_instance(value: Any, module: str, class_name: str) -> bool:
    # Without the module there is no instance; while another thread loads it, the class may be absent.
    return isinstance(value, getattr(sys.modules.get(module), class_name, ()))
