"""The order of a run's prompts, and the position of a resumed run.

`PromptLoader` iterates a dataset batch by batch and epoch by epoch. `StepPrompts` draws the prompts of each generation
batch and gives each an id that its samples share and a seed of its own. Used by the trainers and by validation, in the
driver.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any, Protocol

import numpy as np

from hybridrl.errors import CheckpointError, ConfigError, DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.epoch_sampler import EpochSampler
from hybridrl.trainer.data.seeds import Purpose, row_seeds


class RowDataset(Protocol):
    """What a loader requires of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict: ...


class PromptLoader:
    """Endless batches, each from one epoch; the last batch of an epoch may be smaller. Its position can be saved.

    Args:
        dataset: Rows by number.
        batch_size: Rows of a batch.
        shuffle: Use another order in each epoch (built-in order only).
        seed: Seed of that order.
        collate: Rows to a `DataProto`.
        sampler: Row numbers of an epoch, instead of the built-in order: an iterable, iterated once per epoch. A sampler
            with `state_dict` and `load_state_dict` saves its own position. A sampler with `set_epoch` receives the
            epoch before each one. Any other sampler is iterated again from the first epoch when a run resumes, so it
            must be reproducible.

    Attributes:
        order: Arguments of `EpochSampler`, None with a sampler of the user's own.
    """

    def __init__(
        self,
        dataset: RowDataset,
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
        self.rows: list[int] = []  # of the dataset, in the latest batch
        self.epoch = 0  # of the next batch, counted from 0
        self._rows_taken = 0  # in that epoch
        self._iterator: Iterator[int] | None = None
        self.order = {"seed": seed, "shuffle": shuffle} if sampler is None else None
        self._fingerprint = {"num_rows": len(dataset)} | (self.order or {})
        self._sampler: Any = EpochSampler(len(dataset), shuffle=shuffle, seed=seed) if sampler is None else sampler

    def update_sampler(self, batch: DataProto) -> None:
        """Show a scored generation batch to a sampler that has `update`; other samplers ignore results."""
        if hasattr(self._sampler, "update"):
            self._sampler.update(batch)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches of one epoch.

        Raises:
            ConfigError: The sampler has no length.
        """
        length = self._epoch_length()
        if length is None:
            name = type(self._sampler).__name__
            raise ConfigError(
                f"the sampler {name} has no length; add __len__ to it, or set trainer.total_training_steps"
            )
        return -(-length // self.batch_size)

    def batch_sizes(self, num_batches: int) -> list[int]:
        """Return the number of rows of each of a run's first batches.

        It is `batch_size` for all if the sampler has no length.
        """
        length = self._epoch_length()
        if length is None:
            return [self.batch_size] * num_batches
        epoch = [min(self.batch_size, length - start) for start in range(0, length, self.batch_size)]
        return list(islice(cycle(epoch), num_batches))

    def next_batch(self) -> DataProto:
        """Return the next batch. Raises DataError, see `next_rows`."""
        self.rows = self.next_rows(self.batch_size)
        return self.collate([self.dataset[row] for row in self.rows])

    def next_rows(self, num_rows: int) -> list[int]:
        """Return the next rows of the dataset, all of one epoch; fewer than `num_rows` at its end.

        Raises:
            DataError: A custom sampler yields no rows in an epoch, or more than its length.
        """
        rows = list(islice(self._epoch_iterator(), num_rows))
        if not rows and self._rows_taken:  # without a length, the end of an epoch shows only now
            self._finish_epoch()
            rows = list(islice(self._epoch_iterator(), num_rows))
        if not rows:
            raise DataError(f"the sampler {type(self._sampler).__name__} yields no rows in epoch {self.epoch}")
        self._rows_taken += len(rows)
        length = self._epoch_length()
        if len(rows) < num_rows or (length is not None and self._rows_taken >= length):
            self._finish_epoch()
        return [int(row) for row in rows]

    def state_dict(self) -> dict:
        """Return the position of the next batch as JSON-able values, with a stateful sampler's own state."""
        state = {"epoch": self.epoch, "rows_taken": self._rows_taken} | self._fingerprint
        return state | ({"sampler": copy.deepcopy(self._sampler.state_dict())} if self._is_stateful() else {})

    def load_state_dict(self, state: dict) -> None:
        """Move a new loader to a position from `state_dict`.

        It is usually of another process, and the batch size may differ.

        Raises:
            CheckpointError: The position is of another dataset, seed, order or kind of sampler.
        """
        self._check_state(state)
        self.epoch, self._rows_taken, self._iterator = state["epoch"], state["rows_taken"], None
        if self._is_stateful():
            self._sampler.load_state_dict(copy.deepcopy(state["sampler"]))
            self._iterator = iter(self._sampler) if self._rows_taken else None
            return
        if not hasattr(self._sampler, "set_epoch"):
            for _ in range(self.epoch):
                for _ in self._sampler:
                    pass
        for _ in islice(self._epoch_iterator(), self._rows_taken):
            pass

    def _check_state(self, state: dict) -> None:
        expected = {"epoch", "rows_taken", *self._fingerprint} | ({"sampler"} if self._is_stateful() else set())
        if set(state) != expected:
            name = type(self._sampler).__name__
            raise CheckpointError(
                f"the saved position in the data ({', '.join(state)}) is not one of {name} "
                f"({', '.join(sorted(expected))})"
            )
        for name, value in self._fingerprint.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the saved position in the data is for {name}={state[name]}, but this run has {name}={value}"
                )

    def _is_stateful(self) -> bool:
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
        # Iterate past the end also because a sampler may prepare its next epoch there.
        if next(self._epoch_iterator(), None) is not None:
            raise DataError(
                f"the sampler {type(self._sampler).__name__} yields more rows than its length {self._epoch_length()}"
            )
        self.epoch, self._rows_taken, self._iterator = self.epoch + 1, 0, None


class NoPrompts:
    """The loader of a run that only validates and names no training files.

    It keeps the position of the checkpoint that is validated.
    """

    order = None

    def __init__(self) -> None:
        self.dataset: tuple[dict, ...] = ()
        self.rows: list[int] = []
        self.epoch = 0
        self.steps_per_epoch = 1
        self._position: dict = {}

    def batch_sizes(self, num_batches: int) -> list[int]:
        """Return the number of rows of each of a run's first batches.

        There are no prompts; each batch counts as one row, because a schedule needs a step.
        """
        return [1] * num_batches

    def next_batch(self) -> DataProto:
        """Raise DataError: there are no prompts."""
        raise DataError("data.train_files=[]: there is nothing to train on")

    def update_sampler(self, results: DataProto) -> None:
        """Do nothing: there is no sampler."""

    def state_dict(self) -> dict:
        return dict(self._position)

    def load_state_dict(self, state: dict) -> None:
        self._position = dict(state)


ROW = "dataset_row"  # column: a prompt's row in the training data
EPOCH = "dataset_epoch"  # column of prompts of several epochs: the one in which each was drawn
DEFERRED = "deferred"  # in a saved position: prompts that wait for a long round


class StepPrompts:
    """Draws the generation batches of a run, in order: one per step, or more with `algorithm.filter_groups`.

    Attributes:
        num_drawn: Number of the last batch that was drawn, counted from 1.
    """

    def __init__(self, loader: PromptLoader | NoPrompts, *, seed: int):
        self.loader, self.seed, self.num_drawn = loader, seed, 0

    def next_batch(self) -> DataProto:
        """Return the prompts of the next batch; `meta_info` has its `number` and `epoch`."""
        number, epoch = self.num_drawn + 1, self.loader.epoch
        batch = self.loader.next_batch()
        batch.meta_info = {"number": number, "epoch": epoch}
        assign_uids_and_seeds(batch, seed=self.seed, purpose=Purpose.TRAIN_ROLLOUT, step=number)
        batch.non_tensor_batch[ROW] = np.array(self.loader.rows, dtype=object)
        self.num_drawn = number
        return batch

    def defer_others(self, chosen: Iterable[int] | None, ctx: Any) -> None:
        """Do nothing: a step trains all prompts whose responses it has. `TailPrompts` lets the others wait."""

    def add_deferred(self, ctx: Any) -> None:
        """Do nothing: no prompt waits."""

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches were drawn; the loader saves its own position."""
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of a saved position.

        Raises:
            CheckpointError: It has deferred prompts, which these settings never train.
        """
        if state.get(DEFERRED):
            raise CheckpointError(
                f"the checkpoint has {len(state[DEFERRED])} prompts that wait for a long round; set "
                "algorithm.filter_groups.order=tail_batching as in the run that deferred them, or resume from a "
                "checkpoint without such prompts (rollout/deferred_waiting=0)"
            )
        self.num_drawn = state["num_drawn"]


def assign_uids_and_seeds(batch: DataProto, *, seed: int, purpose: Purpose, step: int) -> None:
    """Add the ids and seeds of the prompts.

    The samples of one prompt share its id. A seed depends only on run seed, purpose, step and row.
    """
    batch.non_tensor_batch["uid"] = np.array([f"{step}-{i}" for i in range(len(batch))], dtype=object)
    batch.batch["seeds"] = row_seeds(len(batch), seed=seed, purpose=purpose, step=step)
