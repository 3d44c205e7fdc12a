"""A rank's own part of an engine's durable state, in memory: what the object store keeps, so that the process that made
it may die.

It goes back into an engine of the same layout: the same ranks, each with the same part of the same model. Nothing is
gathered, cut or written, so it takes about as long as copying the bytes. Between layouts and for ever, there are
checkpoints.
"""

import copy
from collections.abc import Iterator
from typing import Any, TypedDict

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hybridrl.errors import CheckpointError
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.workers.engine.base import Durable, Engine


class Part(TypedDict):
    """tensors: bytes of parameters, buffers and optimizer state, one behind the other. groups: of each optimizer, its
    settings.

    random: state of the generators, by device. num_updates: optimizer steps taken.
    """

    tensors: np.ndarray
    groups: list[list[dict[str, Any]]]
    random: dict[str, np.ndarray]
    num_updates: int


class Snapshots:
    """For workers with one engine that is trained."""

    trained: Engine

    @register(Dispatch.ONE_TO_ALL)
    def take_snapshot(self) -> Part:
        """Return this rank's part of the engine's durable state."""
        return part_of(self.trained)

    @register(Dispatch.ALL_TO_ALL)
    def load_snapshot(self, part: Part) -> None:
        """Continue from what this rank returned, in this process or one before it.

        Called with a list of all ranks' parts.
        """
        put_back(self.trained, part)


@torch.no_grad()
def part_of(engine: Engine) -> Part:
    """Return a copy of what this rank has of the engine's state."""
    durable = engine.durable()
    groups = [[copy.deepcopy(_settings(group)) for group in one.param_groups] for one in durable.optimizers]
    tensors = torch.cat([_bytes_of(tensor) for tensor in _tensors(durable)]).numpy()
    return Part(tensors=tensors, groups=groups, random=_random_state(), num_updates=engine.num_updates)


@torch.no_grad()
def put_back(engine: Engine, part: Part) -> None:
    """Take an engine, whatever it has done since, back to where the part was taken.

    Raises CheckpointError for another layout.
    """
    durable = engine.durable()
    tensors = list(_tensors(durable))
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sum(sizes) != part["tensors"].nbytes:
        raise CheckpointError(
            f"a snapshot of {part['tensors'].nbytes} bytes does not fit this rank's part of the engine, "
            f"which has {sum(sizes)}: it was "
            "taken of another model or under another number of processes; go on from a checkpoint"
        )
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if size:  # a small tensor has no part on some ranks
            own = torch.from_numpy(part["tensors"][start : start + size].copy())
            tensor.copy_(own.view(tensor.dtype).view(tensor.shape))
        start += size
    for optimizer, groups in zip(durable.optimizers, part["groups"], strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(copy.deepcopy(settings))
    _set_random_state(part["random"])
    engine.num_updates = part["num_updates"]


def _tensors(durable: Durable) -> Iterator[torch.Tensor]:
    """What this rank has of every tensor, in an order that is the same whenever it is asked."""
    for module in durable.modules:
        yield from map(_local, [*module.parameters(), *module.buffers()])
    for optimizer in durable.optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            yield _local(parameter)  # not the module's own where it is a float32 copy of it
            for _, value in sorted(optimizer.state[parameter].items()):
                if isinstance(value, torch.Tensor):
                    yield _local(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _random_state() -> dict[str, np.ndarray]:
    state = {"cpu": torch.get_rng_state().numpy()}
    return state | ({"cuda": torch.cuda.get_rng_state().numpy()} if torch.cuda.is_available() else {})


def _set_random_state(state: dict[str, np.ndarray]) -> None:
    torch.set_rng_state(torch.from_numpy(state["cpu"].copy()))
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"].copy()))
