"""Errors that are raised on all ranks, so that none waits in a collective.

Engines call these functions in worker processes: storage errors while writing a checkpoint, and state that is not
finite. The log line of a skipped optimizer step is here too.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from hybridrl.errors import CheckpointError, NonFiniteError, StorageError

# torch's file format raises RuntimeError with one of these words when a file cannot be written.
STREAM_ERRORS = ("PytorchStreamWriter", "inline_container.cc")

logger = logging.getLogger(__name__)


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
        kind = StorageError if _is_storage_error(error) else CheckpointError
        raise kind(f"rank {rank} cannot write {directory}: {_one_line(error)}") from error


def raise_on_all_ranks(problem: Exception | None, directory: str) -> None:
    """Raise StorageError on every rank if any rank has a problem. Collective."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, problem and _one_line(problem))
    for rank, message in enumerate(messages):
        if message is not None:
            raise StorageError(f"rank {rank} cannot write {directory}: {message}") from problem


def _is_storage_error(error: BaseException) -> bool:
    return isinstance(error, OSError) or any(name in str(error) for name in STREAM_ERRORS)


def _one_line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300]


def log_skipped_updates(num_updates: int, norm: float) -> None:
    """Log that an optimizer step is skipped.

    Args:
        num_updates: Optimizer steps applied before it.
        norm: Gradient norm that was found.
    """
    logger.warning(
        "Skipped the optimizer step after update %d: the loss or the gradient is not finite (norm %s), or no token is "
        "left to train on. Parameters are unchanged.",
        num_updates,
        norm,
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return all state tensors of an optimizer."""
    states = [] if optimizer is None else optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def check_finite(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Raise NonFiniteError on every rank if any rank's shard of any tensor is not finite. Collective."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = torch.tensor(int(any(not bool(tensor.isfinite().all()) for tensor in own)), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if found:
        raise NonFiniteError(
            "the model's parameters or its optimizer's state are not finite, although every applied gradient was "
            "finite; no checkpoint is written. Lower the learning rate and resume from the newest checkpoint"
        )
