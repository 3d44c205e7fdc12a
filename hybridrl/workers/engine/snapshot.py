"""Snapshot of a rank's share of an engine's state, in memory.

`recovery/step_retry.py` takes it after a step and keeps it in the object store, so that it outlives the process. It
runs in the worker process. Only an engine of the same layout can load it: the same ranks, each with the same share of
the same model. Nothing is gathered, resharded or written, so it takes about as long as copying the bytes. For another
layout, or for storage, use checkpoints.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hybridrl.errors import CheckpointError
from hybridrl.workers.engine.base import Engine, StateTensors
from hybridrl.workers.engine.checkpoint_files import get_random_state, set_random_state


@torch.no_grad()
def take_engine_state(engine: Engine, *, is_copy: bool = True) -> dict[str, Any]:
    """Return this rank's share of the engine's state.

    Args:
        engine: A trained one.
        is_copy: False: tensors of host memory are not copied, so the result must be stored before the engine goes on.

    Returns:
        `tensors`: the bytes of parameters, buffers and optimizer state, an array each; `groups`: the settings of each
        parameter group of each optimizer; `random`: the state of the random generators, by device; `num_updates`:
        optimizer steps taken.
    """
    state = engine.state_tensors()
    groups = [[copy.deepcopy(_settings(group)) for group in one.param_groups] for one in state.optimizers]
    tensors = [_bytes_of(tensor, is_copy=is_copy) for tensor in _tensors(state)]
    return dict(
        tensors=tensors,
        groups=groups,
        random={name: state.numpy() for name, state in get_random_state().items()},
        num_updates=engine.num_updates,
    )


@torch.no_grad()
def load_engine_state(engine: Engine, snapshot: Mapping[str, Any]) -> None:
    """Set an engine to the state of a snapshot, whatever it has done since.

    Raises:
        CheckpointError: The snapshot is of another model or layout.
    """
    state = engine.state_tensors()
    tensors = list(_tensors(state))
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    stored = [array.nbytes for array in snapshot["tensors"]]
    if sizes != stored:
        raise CheckpointError(
            f"a snapshot of {sum(stored)} bytes does not fit this rank's share of the engine, which has "
            f"{sum(sizes)} bytes: it was taken of another model or with another number of processes; resume from a "
            "checkpoint"
        )
    for tensor, array in zip(tensors, snapshot["tensors"], strict=True):
        if array.nbytes:  # some ranks have no share of a small tensor
            tensor.copy_(torch.from_numpy(array.copy()).view(tensor.dtype).view(tensor.shape))
    for optimizer, groups in zip(state.optimizers, snapshot["groups"], strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(copy.deepcopy(settings))
    set_random_state({name: torch.from_numpy(state.copy()) for name, state in snapshot["random"].items()})
    engine.num_updates = snapshot["num_updates"]


def _tensors(state: StateTensors) -> Iterator[torch.Tensor]:
    """Yield this rank's share of every tensor, always in the same order."""
    own = [tensor for module in state.modules for tensor in (*module.parameters(), *module.buffers())]
    yield from map(_local, own)
    known = {*map(id, own)}
    for optimizer in state.optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in known:
                yield _local(parameter)  # a float32 copy of the module's own
            for _, value in sorted(optimizer.state[parameter].items()):
                if isinstance(value, torch.Tensor):
                    yield _local(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(tensor: torch.Tensor, *, is_copy: bool) -> np.ndarray:
    host = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return host.numpy().copy() if is_copy else host.numpy()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
