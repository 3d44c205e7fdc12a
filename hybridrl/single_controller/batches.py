"""What dispatch takes for a batch of rows: a `DataProto`, or a TensorDict with one batch dimension."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from tensordict import TensorDict

from hybridrl.protocol import DataProto

Batch: TypeAlias = DataProto | TensorDict


def is_batch(value: Any) -> bool:
    return isinstance(value, DataProto) or (isinstance(value, TensorDict) and len(value.batch_size) == 1)


def chunk_rows(batch: Batch, parts: int) -> list:
    """Return `parts` batches of consecutive rows whose sizes differ by at most one; they may be empty and keep the columns."""
    if isinstance(batch, DataProto):
        return batch.chunk_uneven(parts)
    return [piece.to_tensordict() for piece in DataProto.from_tensordict(batch).chunk_uneven(parts)]


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches, which must be of one kind, as one. See `DataProto.concat`."""
    if isinstance(batches[0], DataProto):
        return type(batches[0]).concat(batches)
    return DataProto.concat([b if isinstance(b, DataProto) else DataProto.from_tensordict(b) for b in batches]).to_tensordict()


def size_in_bytes(batch: Batch) -> int:
    """Return the size of the tensor columns."""
    return batch.nbytes if isinstance(batch, DataProto) else batch.bytes()
