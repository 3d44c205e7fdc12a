"""The stateful objects of a trainer: one list for snapshots and checkpoints.

    stateful = {"data": loader, "kl_ctrl": controller, "replay": buffer}
    load_states(stateful, save_states(stateful, "global_step_3"), "global_step_3")

An object with a JSON-able state is `Stateful`. One with files in a checkpoint is also `Stored`. Used by every trainer
(`trainer/loop.py`) and by the retry of steps, in the driver. Weights are not among them: workers save them.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class Stateful(Protocol):
    """An object whose state belongs to snapshot and checkpoint."""

    def state_dict(self) -> Any:
        """Return the present state; later changes of the object must not change it."""

    def load_state_dict(self, state: Any) -> None:
        """Set the object to a state from `state_dict`, which may be loaded again later."""


@runtime_checkable
class Stored(Protocol):
    """A stateful object that writes files for a checkpoint, because its state is no JSON."""

    def save(self, directory: str) -> Any:
        """Write files to `directory`, which may not exist yet; return the JSON-able rest."""

    def load(self, directory: str, state: Any) -> None:
        """Set the object to what `save` wrote; `state` is None in a checkpoint older than the object."""


StatefulObjects = Mapping[str, Stateful]  # by name: their directories, and their keys in trainer.json


def states_in_memory(stateful: StatefulObjects) -> dict[str, Any]:
    """Return the states of all objects for `load_from_memory`."""
    return {name: one.state_dict() for name, one in stateful.items()}


def load_from_memory(stateful: StatefulObjects, state: Mapping[str, Any]) -> None:
    """Set all objects to the states from `states_in_memory`."""
    for name, one in stateful.items():
        one.load_state_dict(state[name])


def save_states(stateful: StatefulObjects, directory: str) -> dict[str, Any]:
    """Write all objects to a checkpoint's directory and return the JSON-able rest."""
    return {
        name: one.save(os.path.join(directory, name)) if isinstance(one, Stored) else one.state_dict()
        for name, one in stateful.items()
    }


def load_states(stateful: StatefulObjects, state: Mapping[str, Any], directory: str) -> None:
    """Set all objects to what `save_states` wrote to a checkpoint's directory."""
    for name, one in stateful.items():
        if isinstance(one, Stored):
            one.load(os.path.join(directory, name), state.get(name))
        else:
            one.load_state_dict(state[name])
