"""Metrics of a step's groups: by hand, and equal to enumerating all subsets."""

import itertools

import numpy as np
import pytest
import torch

from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.sampling.group_metrics import group_metrics


def scored(scores: list[float], *, source: list[str], valid: list[bool] | None = None) -> DataProto:
    tensors = {
        "token_level_scores": torch.tensor(scores)[:, None],
        "reward_valid": torch.tensor(valid or [True] * len(scores)),
    }
    return DataProto.from_dict(tensors, {"data_source": np.array(source, dtype=object)})


def test_two_sources_by_hand():
    batch = scored([0, 0.5, 1, 1, 2, 3], source=["a"] * 4 + ["b"] * 2)
    extra = {"pred": ["x", "y", "z", "z", "u", "u"], "acc": [0, 1, 1, 0, 0, 0]}
    assert group_metrics(batch, extra, n=2) == {
        "train-core/a/acc/mean@2": 0.5,
        "train-core/a/acc/best@2/mean": 1.0,
        "train-core/a/acc/maj@2/mean": 0.5,  # x came before y and is wrong; the first z is right
        "train-aux/a/acc/worst@2/mean": 0.0,
        "train-aux/a/acc/pass@2": 1.0,
        "train-core/b/acc/mean@2": 0.0,
        "train-core/b/acc/best@2/mean": 0.0,
        "train-core/b/acc/maj@2/mean": 0.0,
        "train-aux/b/acc/worst@2/mean": 0.0,
        "train-aux/b/acc/pass@2": 0.0,
    }
    assert group_metrics(batch, {}, n=2) == {
        "train-core/a/reward/mean@2": 0.625,
        "train-core/a/reward/best@2/mean": 0.75,
        "train-aux/a/reward/worst@2/mean": 0.5,
        "train-core/b/reward/mean@2": 2.5,
        "train-core/b/reward/best@2/mean": 3.0,
        "train-aux/b/reward/worst@2/mean": 2.0,
    }


def test_a_group_with_an_invalid_reward_does_not_count():
    batch = scored([1, 1, 0, 0], source=["a"] * 4, valid=[True, False, True, True])
    assert group_metrics(batch, {}, n=2)["train-core/a/reward/mean@2"] == 0
    assert group_metrics(batch, {}, n=1) == {}
    # A reward function that failed has returned no `acc` either.
    found = group_metrics(batch, {"acc": [True, None, np.bool_(True), False]}, n=2)
    assert found["train-core/a/acc/mean@2"] == 0.5 and found["train-aux/a/acc/pass@2"] == 1.0


def test_pass_at_k_is_the_mean_over_all_subsets_of_every_group():
    groups = np.random.default_rng(0).integers(0, 2, size=(5, 6)).astype(float)
    found = group_metrics(scored(groups.flatten().tolist(), source=["a"] * 30), {}, n=6)
    for k in (2, 4, 6):
        subsets = [max(subset) for group in groups for subset in itertools.combinations(group, k)]
        assert found[f"train-aux/a/reward/pass@{k}"] == pytest.approx(np.mean(subsets))
