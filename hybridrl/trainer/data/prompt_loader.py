"""The order of a dataset's rows, batch by batch and epoch by epoch, and the place where a stopped run goes on.

The prompts of each step: drawn in order, each with an id that its samples share and a seed of its own.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any, Protocol

import numpy as np

from hybridrl.errors import CheckpointError, ConfigError, DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.seeds import Purpose, row_seeds


class Rows(Protocol):
    """What a loader needs of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict: ...


class EpochSampler:
    """The rows `0 .. num_rows-1`, each once an epoch; an epoch's order depends on `seed` and its number only."""

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


class PromptLoader:
    """Batches for ever, each from one epoch; an epoch's last batch may be smaller. Its place can be saved and restored
    exactly.

    Args:
        dataset: Rows by number. batch_size: Rows of a batch. shuffle: Another order each epoch (for the built-in
        order). seed: Seed of that order. collate: Rows to a `DataProto`. sampler: Row numbers of an epoch, in place of
        the built-in order: an iterable, iterated once per epoch. If it has `state_dict`
            and `load_state_dict` they keep its place; else if it has `set_epoch` it is called before each epoch; else a
            resumed run iterates a new one from its first epoch again, so it must repeat itself.
    """

    def __init__(
        self,
        dataset: Rows,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        collate: Callable[[list[dict]], DataProto],
        sampler: Iterable[int] | None = None,
    ):
        if len(dataset) == 0:
            raise DataError("the dataset has no rows")
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1")
        self.dataset, self.batch_size, self.collate = dataset, batch_size, collate
        self.rows: list[int] = []  # of the dataset, in the batch that was returned last
        self.epoch = 0  # whole passes done: the epoch of the next batch
        self._rows_taken = 0  # in that epoch
        self._iterator: Iterator[int] | None = None
        self._identity = {"num_rows": len(dataset)} | (
            {} if sampler is not None else {"seed": seed, "shuffle": shuffle}
        )
        self._sampler: Any = EpochSampler(len(dataset), shuffle=shuffle, seed=seed) if sampler is None else sampler

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch.

        Raises:
            ConfigError: The sampler has no length.
        """
        length = self._epoch_length()
        if length is None:
            name = type(self._sampler).__name__
            raise ConfigError(
                f"an epoch of the sampler {name} has no known end; give it __len__, or set trainer.total_training_steps"
            )
        return -(-length // self.batch_size)

    def batch_sizes(self, num_batches: int) -> list[int]:
        """Return how many rows each of a run's first batches has, as far as the sampler tells its length."""
        length = self._epoch_length()
        if length is None:
            return [self.batch_size] * num_batches
        epoch = [min(self.batch_size, length - start) for start in range(0, length, self.batch_size)]
        return list(islice(cycle(epoch), num_batches))

    def next_batch(self) -> DataProto:
        """Return the next batch.

        Raises:
            DataError: A sampler of the user's gives no rows in an epoch, or more than its length.
        """
        rows = list(islice(self._epoch_iterator(), self.batch_size))
        if not rows and self._rows_taken:  # a sampler of unknown length shows its epoch's end only now
            self._finish_epoch()
            rows = list(islice(self._epoch_iterator(), self.batch_size))
        if not rows:
            raise DataError(f"the sampler {type(self._sampler).__name__} gives no rows in epoch {self.epoch}")
        self._rows_taken += len(rows)
        length = self._epoch_length()
        if len(rows) < self.batch_size or (length is not None and self._rows_taken >= length):
            self._finish_epoch()
        self.rows = [int(row) for row in rows]
        return self.collate([self.dataset[row] for row in self.rows])

    def state_dict(self) -> dict:
        """Return the place of the next batch as JSON-able values (a user's sampler's own state as it gives it)."""
        state = {"epoch": self.epoch, "rows_taken": self._rows_taken} | self._identity
        return state | ({"sampler": self._sampler.state_dict()} if self._keeps_own_place() else {})

    def load_state_dict(self, state: dict) -> None:
        """Take a new loader to a place that `state_dict` returned, usually in another process. The batch size may have
        changed.

        Raises:
            CheckpointError: The place is one of another dataset, seed, order or kind of sampler.
        """
        self._check_state(state)
        self.epoch, self._rows_taken, self._iterator = state["epoch"], state["rows_taken"], None
        if self._keeps_own_place():
            self._sampler.load_state_dict(state["sampler"])
            self._iterator = iter(self._sampler) if self._rows_taken else None
            return
        if not hasattr(self._sampler, "set_epoch"):
            for _ in range(self.epoch):
                for _ in self._sampler:
                    pass
        for _ in islice(self._epoch_iterator(), self._rows_taken):
            pass

    def _check_state(self, state: dict) -> None:
        expected = {"epoch", "rows_taken", *self._identity} | ({"sampler"} if self._keeps_own_place() else set())
        if set(state) != expected:
            name = type(self._sampler).__name__
            raise CheckpointError(
                f"the saved place in the data ({', '.join(state)}) is not one of {name} ({', '.join(sorted(expected))})"
            )
        for name, value in self._identity.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the saved place in the data is for {name}={state[name]}, but this run has {name}={value}"
                )

    def _keeps_own_place(self) -> bool:
        return hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict")

    def _epoch_length(self) -> int | None:
        return len(self._sampler) if hasattr(self._sampler, "__len__") else None

    def _epoch_iterator(self) -> Iterator[int]:
        if self._iterator is None:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(self.epoch)
            self._iterator = iter(self._sampler)
        return self._iterator

    def _finish_epoch(self) -> None:
        if (
            next(self._epoch_iterator(), None) is not None
        ):  # asked past its end also because a sampler may prepare its next epoch there
            raise DataError(
                f"the sampler {type(self._sampler).__name__} gives more rows than its length {self._epoch_length()}"
            )
        self.epoch, self._rows_taken, self._iterator = self.epoch + 1, 0, None


ROW = "dataset_row"  # column: which row of the training data a prompt is


class StepPrompts:
    """Draws a batch for each step up to `total_steps`, in order. drawn: the last step that has its prompts."""

    def __init__(self, loader: PromptLoader, *, seed: int, total_steps: int):
        self.loader, self.seed, self.total_steps, self.drawn = loader, seed, total_steps, 0

    def draw(self, *, until: int) -> DataProto | None:
        """Return the prompts of the next step, with `step` and `epoch` in meta_info; None behind step `until` and at
        the end.
        """
        step, epoch = self.drawn + 1, self.loader.epoch
        if step > min(until, self.total_steps):
            return None
        batch = self.loader.next_batch()
        batch.meta_info = {"step": step, "epoch": epoch}
        identify(batch, seed=self.seed, purpose=Purpose.TRAIN_ROLLOUT, step=step)
        batch.non_tensor_batch[ROW] = np.array(self.loader.rows, dtype=object)
        self.drawn = step
        return batch


def identify(batch: DataProto, *, seed: int, purpose: Purpose, step: int) -> None:
    """Give every prompt an id that its samples share, and a seed that depends only on run, purpose, step and row."""
    batch.non_tensor_batch["uid"] = np.array([f"{step}-{i}" for i in range(len(batch))], dtype=object)
    batch.batch["seeds"] = row_seeds(len(batch), seed=seed, purpose=purpose, step=step)
