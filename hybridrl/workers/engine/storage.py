"""Writing state together: what goes wrong on one rank is raised on every one, so that none waits for the others in a collective."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.errors import CheckpointError, StorageError

STREAM_ERRORS = ("PytorchStreamWriter", "inline_container.cc")  # in the RuntimeErrors of torch's file format where a file cannot be written


@contextmanager
def writing(directory: str) -> Iterator[None]:
    """Turn what torch.distributed.checkpoint raises in the block, on every rank, into one StorageError that says why in a line."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        kind = StorageError if _is_of_storage(error) else CheckpointError
        raise kind(f"rank {rank} cannot write {directory}: {_in_a_line(error)}") from error


def raise_together(problem: Exception | None, directory: str) -> None:
    """Raise StorageError on every rank if any of them has a problem. Collective."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem and _in_a_line(problem))
    for rank, said in enumerate(everyone):
        if said is not None:
            raise StorageError(f"rank {rank} cannot write {directory}: {said}") from problem


def _is_of_storage(error: BaseException) -> bool:
    return isinstance(error, OSError) or any(name in str(error) for name in STREAM_ERRORS)


def _in_a_line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300]
