"""Writing state together: what goes wrong on one rank is raised on every one, so that none waits for the others in a
collective.

What is not finite: the optimizer step that is left out for it, and the checkpoint that does not take it.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from hybridrl.errors import CheckpointError, NonFiniteError, StorageError

STREAM_ERRORS = (
    "PytorchStreamWriter",
    "inline_container.cc",
)  # in the RuntimeErrors of torch's file format where a file cannot be written


@contextmanager
def writing(directory: str) -> Iterator[None]:
    """Turn what torch.distributed.checkpoint raises in the block, on every rank, into one StorageError that says why in
    a line.
    """
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


logger = logging.getLogger(__name__)


def log_skipped(num_updates: int, norm: float) -> None:
    """Say that an optimizer step is left out. num_updates: optimizer steps before it."""
    logger.warning(
        "The optimizer step after %d others is skipped: the loss or the gradient is not finite (norm %s).",
        num_updates,
        norm,
    )


def tensors_of(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the optimizer's state of every parameter."""
    states = [] if optimizer is None else optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def check_finite(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Raise NonFiniteError on every rank if any rank's part of any tensor holds a NaN or an infinity. Collective."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = torch.tensor(int(any(not bool(tensor.isfinite().all()) for tensor in own)), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if found:
        raise NonFiniteError(
            "the model's parameters or its optimizer's state are not finite, although every gradient that "
            "was applied was; they are not "
            "written into a checkpoint. Lower the learning rate, and go on from the newest commit"
        )
