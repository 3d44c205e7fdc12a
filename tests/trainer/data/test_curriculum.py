"""The curriculum: prompts of middling difficulty first, each once per epoch, and the same order after a resume."""

import json

import numpy as np
import pytest
import torch

from hybridrl.config.schema.data import DataConfig, SamplerConfig
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.curriculum import MIN_WEIGHT, SuccessRateSampler
from hybridrl.trainer.data.prompt_dataset import load_prompt_data, load_sampler
from hybridrl.trainer.data.prompt_loader import ROW

MODULE = "hybridrl.trainer.data.curriculum"


def results(rows: list[int], rewards: list[float], *, valid: list[bool] | None = None, **columns) -> DataProto:
    tensors = {
        "token_level_scores": torch.tensor(rewards)[:, None],
        "reward_valid": torch.tensor(valid or [True] * len(rows)),
    }
    arrays = {ROW: np.array(rows, dtype=object)} | {k: np.array(v, dtype=object) for k, v in columns.items()}
    return DataProto.from_dict(tensors, arrays)


def sampler(num_rows: int = 100, seed: int = 3) -> SuccessRateSampler:
    return SuccessRateSampler(range(num_rows), DataConfig(seed=seed))


def test_the_rate_is_a_running_mean_of_valid_results():
    found = sampler(4)
    found.update(results([0, 0, 1, 1, 2], [1.0, 0.0, 5.0, 1.0, 0.0], valid=[True] * 4 + [False]))
    assert found.rates[:2].tolist() == [0.5, 1.0] and np.isnan(found.rates[2:]).all()
    found.update(results([0, 0], [1.0, 1.0]))
    assert found.rates[0] == 0.75  # half of the old 0.5, half of the new 1
    found.update(results([3, 3], [9.0, 9.0], acc=[0, 1]))
    assert found.rates[3] == 0.5
    assert found.weights().tolist() == [0.75, MIN_WEIGHT, 1.0, 1.0]


def test_every_epoch_has_every_row_once_and_hopeless_rows_come_late():
    found = sampler()
    assert sorted(found) == list(range(100))
    found.update(results(list(range(50)), [0.0] * 50))  # never solved
    places = []
    for epoch in range(1, 21):
        found.set_epoch(epoch)
        order = list(found)
        assert sorted(order) == list(range(100))
        places.append(np.mean([place for place, row in enumerate(order) if row < 50]))
    # With weights 0.05 : 1 a hopeless row comes before another one with probability 0.05 / 1.05 = 0.048: its place is
    # 24.5 (among its own) + 50 * 0.952 = 72.1 on average.
    assert np.mean(places) == pytest.approx(72.1, abs=1.0)


def test_the_order_depends_on_seed_and_epoch():
    first, same, other = sampler(), sampler(), sampler(seed=4)
    orders = [list(first), list(same), list(other)]
    first.set_epoch(1)
    assert orders[0] == orders[1] != orders[2] and list(first) != orders[0]


@pytest.mark.parametrize("batches", [0, 3, 7, 10, 13])
def test_a_resumed_loader_draws_the_same_rows_and_sees_the_same_rates(batches):
    data = DataConfig(train_batch_size=3, sampler=SamplerConfig(MODULE, "SuccessRateSampler"))

    def loader():
        rows = [{"row": torch.tensor(row)} for row in range(29)]  # the last batch of an epoch is smaller
        return load_prompt_data(
            data,
            None,
            rows,
            None,
            lambda items: DataProto.from_dict({"row": torch.stack([item["row"] for item in items])}),
            None,
        )[0]

    def step(of) -> list[int]:
        of.next_batch()
        of.update_sampler(results(of.rows, [float(row % 3 == 0) for row in of.rows]))
        return of.rows

    whole = loader()
    for _ in range(batches):
        step(whole)
    again = loader()
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [step(again) for _ in range(15)] == [step(whole) for _ in range(15)]


def test_what_is_no_sampler_is_refused():
    with pytest.raises(ConfigError, match="go together"):
        load_sampler(DataConfig(sampler=SamplerConfig(MODULE, None)), [])
    with pytest.raises(ConfigError, match="UNKNOWN_RATE in .* has no __iter__, state_dict, load_state_dict"):
        load_sampler(DataConfig(sampler=SamplerConfig(MODULE, "UNKNOWN_RATE")), [])
    with pytest.raises(CheckpointError, match="4 rows.*training data has 5"):
        sampler(5).load_state_dict(sampler(4).state_dict())
