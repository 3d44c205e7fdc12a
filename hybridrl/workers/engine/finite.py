"""What is not finite: the optimizer step that is left out for it, and the checkpoint that does not take it."""

import logging
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridrl.errors import NonFiniteError

logger = logging.getLogger(__name__)


def log_skipped(num_updates: int, norm: float) -> None:
    """Say that an optimizer step is left out. num_updates: optimizer steps before it."""
    logger.warning("The optimizer step after %d others is skipped: the loss or the gradient is not finite (norm %s).", num_updates, norm)


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
            "the model's parameters or its optimizer's state are not finite, although every gradient that was applied was; they are not "
            "written into a checkpoint. Lower the learning rate, and go on from the newest commit"
        )
