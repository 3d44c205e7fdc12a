"""Random seeds that depend only on their use: run seed, step and purpose.

So a resumed run draws the same numbers as an uninterrupted one. Used by the trainers, in the driver.
"""

import enum

import numpy as np
import torch


class Purpose(enum.IntEnum):
    """What a stream of random numbers is for. The value is part of the seed: never change it."""

    TRAIN_ROLLOUT = 1
    VALIDATION = 2
    SHUFFLE = 3
    REPLAY = 4
    SELECTION = 5
    RESAMPLING = 6


def row_seeds(num_rows: int, *, seed: int, purpose: Purpose, step: int) -> torch.Tensor:
    """Return one seed per prompt row, (num_rows,) int64, non-negative."""
    return torch.from_numpy(_generator(seed, purpose, step).integers(0, 2**63 - 1, size=num_rows, dtype=np.int64))


def call_seed(*, seed: int, purpose: Purpose, step: int) -> int:
    """Return one seed for a whole call, below 2**31."""
    return int(_generator(seed, purpose, step).integers(0, 2**31 - 1))


def _generator(seed: int, purpose: Purpose, step: int) -> np.random.Generator:
    return np.random.default_rng([seed, int(purpose), step])
