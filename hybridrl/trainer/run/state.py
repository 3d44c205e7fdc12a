"""Stateful parts of a trainer: one list for snapshots and checkpoints.

    parts = {"data": loader, "kl_ctrl": controller, "replay": buffer}
    load_parts(parts, save_parts(parts, "global_step_3"), "global_step_3")

A part with a JSON-able state is `Stateful`. A part with files in a checkpoint is also `Stored`. Used by every trainer
(`trainer/loop.py`) and by the retry of steps, in the driver. Weights are not among the parts: workers save them.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class Stateful(Protocol):
    """A part whose state belongs to snapshot and checkpoint."""

    def state_dict(self) -> Any:
        """Return the present state; later changes of the part must not change it."""

    def load_state_dict(self, state: Any) -> None:
        """Set the part to a state from `state_dict`, which may be loaded again later."""


@runtime_checkable
class Stored(Protocol):
    """A stateful part that writes files for a checkpoint, because its state is no JSON."""

    def save(self, directory: str) -> Any:
        """Write files to `directory`, which may not exist yet; return the JSON-able rest."""

    def load(self, directory: str, state: Any) -> None:
        """Set the part to what `save` wrote; `state` is None in a checkpoint older than the part."""


Parts = Mapping[str, Stateful]  # name, also of its directory and its key in trainer.json -> part


def parts_in_memory(parts: Parts) -> dict[str, Any]:
    """Return the state of all parts for `load_from_memory`."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_from_memory(parts: Parts, state: Mapping[str, Any]) -> None:
    """Set all parts to a state from `parts_in_memory`."""
    for name, part in parts.items():
        part.load_state_dict(state[name])


def save_parts(parts: Parts, directory: str) -> dict[str, Any]:
    """Write all parts to a checkpoint's directory and return the JSON-able rest."""
    return {
        name: part.save(os.path.join(directory, name)) if isinstance(part, Stored) else part.state_dict()
        for name, part in parts.items()
    }


def load_parts(parts: Parts, state: Mapping[str, Any], directory: str) -> None:
    """Set all parts to what `save_parts` wrote to a checkpoint's directory."""
    for name, part in parts.items():
        if isinstance(part, Stored):
            part.load(os.path.join(directory, name), state.get(name))
        else:
            part.load_state_dict(state[name])
