"""`EpochSampler`: the order of a dataset's rows in each epoch.

`PromptLoader` draws in this order in the driver, and the audit of a run's ledger repeats it, without torch.
"""

from collections.abc import Iterator

import numpy as np


class EpochSampler:
    """The rows `0 .. num_rows-1`, each once per epoch; an epoch's order depends only on `seed` and its number."""

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int):
        self.num_rows, self.shuffle, self.seed = num_rows, shuffle, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch, (num_rows,) int64."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
