"""The order of rows: each once per epoch, reproducible from the seed, and resumable at every position."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hybridrl.errors import CheckpointError, ConfigError, DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.epoch_sampler import EpochSampler
from hybridrl.trainer.data.prompt_loader import PromptLoader


class Numbers:
    """Rows that hold their own number."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict:
        return {"row": range(self.num_rows)[row]}


def collate(rows: list[dict]) -> DataProto:
    return DataProto.from_dict({"row": torch.tensor([row["row"] for row in rows])})


def make_loader(
    num_rows: int = 7, *, batch_size: int = 3, shuffle: bool = True, seed: int = 5, sampler=None
) -> PromptLoader:
    return PromptLoader(
        Numbers(num_rows), batch_size=batch_size, shuffle=shuffle, seed=seed, collate=collate, sampler=sampler
    )


def take(loader: PromptLoader, num_batches: int) -> list[list[int]]:
    return [loader.next_batch().batch["row"].tolist() for _ in range(num_batches)]


class Repeating:
    """A sampler without state: the same rows in every epoch, with or without a length."""

    def __init__(self, rows: list[int]):
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


class Shuffling(Repeating):
    """A sampler without state whose random numbers continue from epoch to epoch."""

    def __init__(self, rows: list[int]):
        super().__init__(rows)
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(self.rows).tolist())


class Rotating(Repeating):
    """A sampler with `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows[self.epoch :] + self.rows[: self.epoch])


class Stateful(Repeating):
    """A sampler that saves its own position, and reverses its order after every epoch."""

    def __init__(self, rows: list[int]):
        super().__init__(rows)
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]
        self.place, self.rows = 0, self.rows[::-1]

    def state_dict(self) -> dict:
        return {"place": self.place, "rows": list(self.rows)}

    def load_state_dict(self, state: dict) -> None:
        self.place, self.rows = state["place"], list(state["rows"])


def test_an_epoch_has_every_row_once_and_its_order_depends_on_seed_and_epoch_only():
    orders = {
        (seed, epoch): EpochSampler(50, shuffle=True, seed=seed).order(epoch).tolist()
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    sampler = EpochSampler(50, shuffle=True, seed=1)
    sampler.set_epoch(1)
    assert list(sampler) == orders[1, 1]
    assert EpochSampler(4, shuffle=False, seed=1).order(3).tolist() == [0, 1, 2, 3]


def test_batches_never_mix_epochs_and_the_last_of_an_epoch_may_be_smaller():
    loader = make_loader(7, batch_size=3)
    assert loader.steps_per_epoch == 3
    sampler = EpochSampler(7, shuffle=True, seed=5)
    for epoch in range(3):
        epochs, batches = [], []
        for _ in range(3):
            epochs.append(loader.epoch)
            batches += take(loader, 1)
        order = sampler.order(epoch).tolist()
        assert epochs == [epoch] * 3
        assert batches == [order[:3], order[3:6], order[6:]]


def test_the_sizes_of_a_runs_batches_are_known_before_it_starts():
    loader = make_loader(7, batch_size=3)
    assert loader.batch_sizes(5) == [3, 3, 1, 3, 3] == [len(rows) for rows in take(loader, 5)]
    assert make_loader(2, batch_size=3).batch_sizes(2) == [2, 2]


@pytest.mark.parametrize(("num_rows", "batch_size", "steps"), [(6, 3, 2), (7, 3, 3), (2, 5, 1), (1, 1, 1)])
def test_an_epoch_ends_after_the_rounded_up_number_of_batches(num_rows, batch_size, steps):
    loader = make_loader(num_rows, batch_size=batch_size)
    assert loader.steps_per_epoch == steps
    assert sorted(sum(take(loader, steps), [])) == list(range(num_rows))
    assert loader.epoch == 1


ROWS = [4, 0, 2, 6, 1, 5]
SAMPLERS = {
    "built-in": lambda: None,
    "in file order": lambda: None,
    "list": lambda: list(ROWS),
    "unknown length": lambda: Repeating(list(ROWS)),
    "own random numbers": lambda: Shuffling(list(ROWS)),
    "told the epoch": lambda: Rotating(list(ROWS)),
    "own place": lambda: Stateful(list(ROWS)),
}


@pytest.mark.parametrize("batch_size", [1, 2, 4, 10])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_stopped_after_any_batch_continues_as_if_uninterrupted(name, batch_size):
    def fresh() -> PromptLoader:
        return make_loader(batch_size=batch_size, shuffle=name != "in file order", sampler=SAMPLERS[name]())

    whole = take(fresh(), 22)
    running = fresh()
    for stop in range(20):
        saved = json.loads(json.dumps(running.state_dict()))
        resumed = fresh()
        resumed.load_state_dict(saved)
        assert resumed.state_dict() == saved
        assert take(resumed, 2) == whole[stop : stop + 2]
        assert take(running, 1) == whole[stop : stop + 1]


def test_a_resumed_run_may_have_another_batch_size():
    first = make_loader(7, batch_size=3)
    taken = take(first, 1)
    second = make_loader(7, batch_size=2)
    second.load_state_dict(first.state_dict())
    assert sorted(sum(taken + take(second, 2), [])) == list(range(7))


def test_a_position_can_be_loaded_into_a_loader_that_was_used():
    loader = make_loader()
    take(loader, 2)
    saved = loader.state_dict()
    ahead = take(loader, 5)
    loader.load_state_dict(saved)
    assert take(loader, 5) == ahead


def test_a_position_in_other_data_is_rejected_by_name():
    saved = make_loader(7).state_dict()
    for other, message in (
        (make_loader(8), "is for num_rows=7, but this run has num_rows=8"),
        (make_loader(7, seed=6), "is for seed=5, but this run has seed=6"),
        (make_loader(7, shuffle=False), "is for shuffle=True, but this run has shuffle=False"),
        (make_loader(7, sampler=Stateful(ROWS)), "is not one of Stateful"),
        (make_loader(7, sampler=list(ROWS)), "is not one of list"),
    ):
        with pytest.raises(CheckpointError, match=message):
            other.load_state_dict(saved)
    with pytest.raises(CheckpointError, match="is not one of EpochSampler"):
        make_loader(7).load_state_dict(make_loader(7, sampler=Stateful(ROWS)).state_dict())
    with pytest.raises(CheckpointError, match="is not one of EpochSampler"):
        make_loader(7).load_state_dict({})


def test_a_samplers_epoch_may_be_shorter_or_longer_than_the_dataset():
    loader = make_loader(7, batch_size=4, sampler=[3, 3, 1, 0, 2, 2, 2, 2])
    assert loader.steps_per_epoch == 2
    assert take(loader, 3) == [[3, 3, 1, 0], [2, 2, 2, 2], [3, 3, 1, 0]]
    assert loader.epoch == 1


class Lying(Repeating):
    def __len__(self) -> int:
        return 2


def test_a_sampler_that_cannot_be_used_is_rejected():
    with pytest.raises(DataError, match="list yields no rows in epoch 0"):
        make_loader(sampler=[]).next_batch()
    with pytest.raises(DataError, match="list_iterator yields no rows in epoch 1"):
        take(make_loader(batch_size=2, sampler=iter([1, 2])), 2)
    with pytest.raises(DataError, match="Lying yields more rows than its length 2"):
        make_loader(batch_size=2, sampler=Lying([0, 1, 2])).next_batch()
    with pytest.raises(IndexError):
        make_loader(sampler=[7]).next_batch()
    with pytest.raises(ConfigError, match="Repeating has no length; .*__len__.*trainer.total_training_steps"):
        make_loader(sampler=Repeating(ROWS)).steps_per_epoch  # noqa: B018


def test_an_empty_dataset_and_an_empty_batch_are_rejected():
    with pytest.raises(DataError, match="no rows"):
        make_loader(0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        make_loader(batch_size=0)
