"""Down-sampling of a batch: rows keep their order and their columns."""

import numpy as np
import pytest
import torch

from hybridrl.config.schema.ppo import SelectSamplesConfig
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.update_batch import choose_samples


def scored(scores: list[float]) -> DataProto:
    values = torch.tensor(scores)
    tensors = {
        "token_level_scores": torch.stack([values.nan_to_num() / 2] * 2, dim=1),
        "reward_valid": values.isfinite(),
        "row": torch.arange(len(scores)),
    }
    return DataProto.from_dict(tensors, {"uid": np.array(["a"] * 4 + ["b"] * 4, dtype=object)})


def test_the_chosen_rows_of_each_group_stay_in_order():
    batch = scored([0, 1, 1, 1, 3, float("nan"), 1, 2])
    chosen, metrics = choose_samples(batch, SelectSamplesConfig(k=2), n=4, seed=0)
    assert chosen.batch["row"].tolist() == [0, 1, 4, 6] and chosen.non_tensor_batch["uid"].tolist() == list("aabb")
    best, _ = choose_samples(batch, SelectSamplesConfig(k=3, method="max_reward"), n=4, seed=0)
    assert best.batch["row"].tolist() == [1, 2, 3, 4, 6, 7]
    # Over the seven valid samples, before the choice.
    assert metrics["training/select_samples/seq_reward_mean"] == pytest.approx(9 / 7)
    assert metrics["training/select_samples/left_out_samples"] == 4
