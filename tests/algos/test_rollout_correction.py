"""Importance weights for samples of another policy, with numbers worked out by hand."""

import math

import pytest
import torch

from hybridrl.algos.rollout_correction import correction_stats, effective_sample_share, log_ratio, rollout_is_weights
from hybridrl.errors import DataError

# Ratios 2, 1/2 | 4, off the mask
OLD = torch.tensor([[math.log(0.4), math.log(0.1)], [math.log(0.8), 0.0]])
ROLLOUT = torch.tensor([[math.log(0.2), math.log(0.2)], [math.log(0.2), -50.0]])
MASK = torch.tensor([[1, 1], [1, 0]])


def weights(level: str, threshold: float) -> torch.Tensor:
    return rollout_is_weights(OLD, ROLLOUT, MASK, level=level, threshold=threshold)


def test_token_weights_are_ratios_cut_off_above():
    torch.testing.assert_close(weights("token", 3.0), torch.tensor([[2.0, 0.5], [3.0, 0.0]]))


def test_sequence_weights_are_products_over_the_row():
    # 2 * 1/2 = 1 | 4
    torch.testing.assert_close(weights("sequence", 10.0), torch.tensor([[1.0, 1.0], [4.0, 0.0]]))
    torch.testing.assert_close(weights("sequence", 3.0), torch.tensor([[1.0, 1.0], [3.0, 0.0]]))


def test_the_same_policy_weighs_one_and_what_is_off_the_mask_is_never_read():
    spoiled = torch.where(MASK.bool(), OLD, torch.full_like(OLD, float("nan")))
    assert torch.equal(rollout_is_weights(spoiled, OLD, MASK, level="token", threshold=2.0), MASK.float())


def test_importance_weights_make_another_policys_mean_ours():
    """E over rollout of w f = E over old of f, when nothing is cut off."""
    generator = torch.Generator().manual_seed(0)
    old, rollout, f = (
        torch.rand(50, generator=generator),
        torch.rand(50, generator=generator) + 0.2,
        torch.randn(50, generator=generator),
    )
    old, rollout = (old / old.sum()).double(), (rollout / rollout.sum()).double()
    w = rollout_is_weights(old.log()[:, None], rollout.log()[:, None], torch.ones(50, 1), level="token", threshold=1e6)[
        :, 0
    ]
    torch.testing.assert_close((rollout * w * f).sum(), (old * f).sum())


def test_the_effective_share_is_one_for_equal_weights_and_one_of_n_for_a_single_one():
    mask = torch.ones(1, 4)
    assert effective_sample_share(torch.full((1, 4), 3.0), mask) == 1
    assert effective_sample_share(torch.tensor([[0.0, 0.0, 5.0, 0.0]]), mask) == 0.25


def test_stats_measure_the_mismatch_of_the_policies():
    stats = correction_stats(weights("token", 10.0), log_ratio(OLD, ROLLOUT, MASK), MASK)
    # weights 2, 1/2, 4; log-ratios ln 2, -ln 2, 2 ln 2
    assert stats["is_mean"] == pytest.approx(6.5 / 3) and (stats["is_min"], stats["is_max"]) == (
        0.5,
        pytest.approx(4.0),
    )
    assert stats["is_eff_sample_size"] == pytest.approx(6.5**2 / (3 * 20.25))
    assert stats["kl"] == pytest.approx(-2 * math.log(2) / 3)
    assert stats["k3_kl"] == pytest.approx((6.5 - 2 * math.log(2)) / 3 - 1)


def test_large_differences_stay_finite():
    assert torch.isfinite(rollout_is_weights(OLD, OLD - 1e4, MASK, level="sequence", threshold=1e30)).all()


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="level='word' is not known; known are token, sequence"):
        weights("word", 2.0)
    with pytest.raises(ValueError, match="threshold=0"):
        weights("token", 0)
    with pytest.raises(DataError, match="rollout_log_probs"):
        rollout_is_weights(OLD, ROLLOUT[:1], MASK, level="token", threshold=2.0)
