"""Split and join batches of either kind: `DataProto`, or a TensorDict with one batch dimension.

Dispatch uses these functions in the driver, and workers when they answer.
"""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from hybridrl.data_plane import tensordict_utils
from hybridrl.data_plane.merging import merge_meta_info
from hybridrl.data_plane.sharing import CopyOnWrite


def is_batch(value: Any) -> bool:
    """Return whether the value is a `DataProto` or a TensorDict with one batch dimension."""
    return isinstance(value, CopyOnWrite) or (isinstance(value, TensorDict) and len(value.batch_size) == 1)


def chunk_rows(batch: Any, parts: int) -> list:
    """Return `parts` batches of consecutive rows whose sizes differ by at most one.

    A batch may be empty and keeps the columns.
    """
    _check(batch)
    return (
        tensordict_utils.chunk_tensordict(batch, parts) if isinstance(batch, TensorDict) else batch.chunk_uneven(parts)
    )


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
    if not isinstance(batches[0], TensorDict):
        return type(batches[0]).concat(batches)
    if not all(isinstance(batch, TensorDict) for batch in batches):
        raise TypeError(f"concatenation needs batches of one kind, got {[type(batch).__name__ for batch in batches]}")
    meta = merge_meta_info(tensordict_utils.meta_of(batch) for batch in batches)
    return tensordict_utils.concat_with_meta(batches, meta)


def size_in_bytes(batch: Any) -> int:
    """Return the size of the tensor columns."""
    return batch.bytes() if isinstance(batch, TensorDict) else batch.nbytes


def _check(batch: Any) -> None:
    if not is_batch(batch):
        shape = f" of batch_size {tuple(batch.batch_size)}" if isinstance(batch, TensorDict) else ""
        raise TypeError(
            f"a batch is a DataProto or a TensorDict with one batch dimension, got {type(batch).__name__}{shape}"
        )
