"""Checkpointed state of an FSDP2 engine, read and written by `torch.distributed.checkpoint` (DCP).

Every rank writes its own shards. DCP reshards them for any other number of ranks. Random states belong to a rank, not
to a shard: a rank that did not exist when the checkpoint was written keeps its current random state.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hybridrl.errors import CheckpointError, reason_of
from hybridrl.workers.engine import checkpoint_files
from hybridrl.workers.engine.safe_load import METADATA, read_metadata, without_code


def save_state(directory: str, *, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Write model, optimizer, step count and this rank's random state, fsynced. Collective.

    Raises:
        StorageError: Some rank cannot write. Raised on every rank.
    """
    state = _state(model, optimizer) | {"step": torch.tensor(step), "random": _random_state()}
    with checkpoint_files.collective_write(directory):
        dcp.save(state, storage_writer=checkpoint_files.PortableWriter(directory))


def load_state(directory: str, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Read what `save_state` wrote into model, optimizer and random generators. Collective.

    Returns:
        The step count.

    Raises:
        CheckpointError: Part of the state is missing; the message names it.
    """
    metadata = _metadata(directory)
    state = _state(model, optimizer) | {"step": torch.tensor(0)}
    random = {key: value for key, value in _random_state().items() if f"random.{key}" in metadata.state_dict_metadata}
    try:
        with without_code(directory):
            dcp.load(state | {"random": random}, checkpoint_id=directory)
    except (dcp.api.CheckpointException, RuntimeError, OSError) as error:
        raise CheckpointError(f"{directory} cannot be read into this model: {_reasons(error)}") from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    checkpoint_files.set_random_state({key.rpartition("_")[0]: value for key, value in random.items()})
    return int(state["step"])


def _reasons(error: BaseException) -> str:
    """Return what went wrong; of DCP's error the causes of the ranks, without their tracebacks."""
    failures = getattr(error, "failures", None)
    causes = [cause for cause, _ in failures.values()] if failures else [error]
    return "; ".join(dict.fromkeys(map(reason_of, causes)))


def _metadata(directory: str) -> Metadata:
    path = os.path.join(directory, METADATA)
    if not os.path.exists(path):
        raise CheckpointError(
            f"{directory} holds no engine state: .metadata is missing, so the write never started or did not finish. "
            "Resume from another checkpoint"
        )
    return read_metadata(path)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict:
    state = {"model": get_model_state_dict(model)}
    return state if optimizer is None else state | {"optimizer": _optimizer_state(model, optimizer)}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return DCP's optimizer state, initialised without counting a step.

    DCP initialises a fresh optimizer by a step without gradients. Were it counted, the first real step would be
    smaller.
    """
    if not optimizer.state:
        get_optimizer_state_dict(model, optimizer)
        for state in optimizer.state.values():
            state["step"].zero_()
    return get_optimizer_state_dict(model, optimizer)


def _random_state() -> dict[str, torch.Tensor]:
    return {f"{generator}_{dist.get_rank()}": state for generator, state in checkpoint_files.get_random_state().items()}
