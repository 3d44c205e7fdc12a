"""Files of a checkpoint: written so that every supported Python reads them, and failures raised on all ranks.

Also the random state of a process, which checkpoints and snapshots hold. Both engines call it in worker processes.
`safe_load.py` reads what may come from somebody else.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from hybridrl.errors import CheckpointError, StorageError, is_storage_error, reason_of


class PortableWriter(dcp.FileSystemWriter):
    """Writer of torch.distributed.checkpoint whose metadata hold the directory as text.

    torch's own writer pickles a `pathlib.Path`. Python 3.13 keeps that class in a module that other versions lack, so
    they could not read the metadata. Files are fsynced.
    """

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)


@contextmanager
def collective_write(directory: str) -> Iterator[None]:
    """Raise one error on every rank when a DCP write in the block fails.

    DCP is torch.distributed.checkpoint. The error is StorageError if storage failed, else CheckpointError. It states
    the failed rank and the reason in one line.
    """
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        kind = StorageError if is_storage_error(error) else CheckpointError
        raise kind(f"rank {rank} cannot write {directory}: {reason_of(error):.300}") from error


def raise_on_all_ranks(problem: Exception | None, directory: str) -> None:
    """Raise StorageError on every rank if any rank has a problem. Collective."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, problem and f"{reason_of(problem):.300}")
    for rank, message in enumerate(messages):
        if message is not None:
            raise StorageError(f"rank {rank} cannot write {directory}: {message}") from problem


def get_random_state() -> dict[str, torch.Tensor]:
    """Return generator -> state (uint8): "cpu", and "cuda" where there is a device."""
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set the generators that `state` has, as `get_random_state` returns it; "cuda" is ignored without a device."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
