"""The random state of a training process.

It is that of torch's generators, on the CPU and on the current CUDA device.
"""

from collections.abc import Mapping

import torch


def get_random_state() -> dict[str, torch.Tensor]:
    """Return generator -> state (uint8): "cpu", and "cuda" where there is a device."""
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set the generators that `state` has, as `get_random_state` returns it; "cuda" is ignored without a device."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
