"""Weights, rejections and mismatch statistics for samples of another policy, with numbers worked out by hand."""

import math

import pytest
import torch

from hybridrl.algos.rollout_correction import (
    DIVERGENCES,
    Rejection,
    effective_sample_share,
    importance_ratios,
    log_ratio,
    mismatch_stats,
    normalize_weights,
    rejection_mask,
    rejection_stats,
    rollout_is_weights,
    weight_stats,
)
from hybridrl.config.schema.rollout_correction import REJECTION_KINDS
from hybridrl.errors import DataError

LN2 = math.log(2)
# Ratios 2, 1/2 | 4, off the mask
OLD = torch.tensor([[math.log(0.4), math.log(0.1)], [math.log(0.8), 0.0]])
ROLLOUT = torch.tensor([[math.log(0.2), math.log(0.2)], [math.log(0.2), -50.0]])
MASK = torch.tensor([[1, 1], [1, 0]])
SAMPLES = (OLD, ROLLOUT, MASK)


def weights(level: str, threshold: float, lower: float | None = None) -> torch.Tensor:
    return rollout_is_weights(*SAMPLES, level=level, threshold=threshold, lower=lower)


def kept(*rejections: Rejection) -> list[list[bool]]:
    return rejection_mask(*SAMPLES, rejections).tolist()


def stats_of(level: str, threshold: float, lower: float | None = None, samples=SAMPLES) -> dict[str, float]:
    bounds = {"level": level, "threshold": threshold, "lower": lower}
    return weight_stats(
        rollout_is_weights(*samples, **bounds), importance_ratios(*samples, level=level), samples[2], **bounds
    )


# -- weights


def test_token_weights_are_ratios_cut_off_above():
    torch.testing.assert_close(weights("token", 3.0), torch.tensor([[2.0, 0.5], [3.0, 0.0]]))


def test_sequence_weights_are_products_over_the_row():
    # 2 * 1/2 = 1 | 4
    torch.testing.assert_close(weights("sequence", 10.0), torch.tensor([[1.0, 1.0], [4.0, 0.0]]))
    torch.testing.assert_close(weights("sequence", 3.0), torch.tensor([[1.0, 1.0], [3.0, 0.0]]))


def test_with_a_lower_bound_weights_outside_become_zero_and_none_is_cut_off():
    torch.testing.assert_close(weights("token", 3.0, 0.6), torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    torch.testing.assert_close(weights("token", 4.001, 0.499), torch.tensor([[2.0, 0.5], [4.0, 0.0]]))
    torch.testing.assert_close(weights("sequence", 3.0, 0.5), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_the_same_policy_weighs_one_and_what_is_off_the_mask_is_never_read():
    spoiled = torch.where(MASK.bool(), OLD, torch.full_like(OLD, float("nan")))
    for level in ("token", "sequence"):
        assert torch.equal(rollout_is_weights(spoiled, OLD, MASK, level=level, threshold=2.0), MASK.float())


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


def test_a_sequence_is_limited_as_a_whole_and_not_token_by_token():
    # log-ratios 30 and -29: the sequence's ratio is e. Limiting each token to 20 first would make it 1.
    rollout = torch.zeros(1, 2)
    w = rollout_is_weights(torch.tensor([[30.0, -29.0]]), rollout, torch.ones(1, 2), level="sequence", threshold=10.0)
    torch.testing.assert_close(w, torch.full((1, 2), math.e))


def test_normalised_weights_have_the_mean_one_over_tokens_or_over_rows():
    w = weights("token", 10.0)  # 2, 1/2, 4: mean 6.5 / 3
    normal, mean = normalize_weights(w, MASK, level="token")
    assert float(mean) == pytest.approx(6.5 / 3)
    assert normal.sum().item() == pytest.approx(3.0)
    w = weights("sequence", 10.0)  # rows 1 and 4: mean 2.5, though two of three tokens have 1
    normal, mean = normalize_weights(w, MASK, level="sequence")
    assert float(mean) == pytest.approx(2.5) and normal[:, 0].tolist() == pytest.approx([0.4, 1.6])


def test_weights_that_are_all_zero_are_not_divided():
    normal, mean = normalize_weights(torch.zeros(2, 2), MASK, level="token")
    assert float(mean) == 1 and not normal.any()


def test_the_effective_share_is_one_for_equal_weights_and_one_of_n_for_a_single_one():
    mask = torch.ones(1, 4)
    assert effective_sample_share(torch.full((1, 4), 3.0), mask) == 1
    assert effective_sample_share(torch.tensor([[0.0, 0.0, 5.0, 0.0]]), mask) == 0.25


def test_weight_statistics_of_tokens():
    stats = stats_of("token", 3.0)  # weights 2, 1/2, 3 of ratios 2, 1/2, 4
    assert stats["rollout_is_mean"] == pytest.approx(5.5 / 3)
    assert (stats["rollout_is_min"], stats["rollout_is_max"]) == (0.5, 3.0)
    assert stats["rollout_is_raw_max"] == pytest.approx(4.0)  # how far off the sample was, before the threshold
    assert stats["rollout_is_eff_sample_size"] == pytest.approx(5.5**2 / (3 * 13.25))
    assert stats["rollout_is_std"] == pytest.approx(math.sqrt(13.25 / 3 - (5.5 / 3) ** 2))
    assert stats["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert stats["rollout_is_ratio_fraction_low"] == 0
    # rows: (2 + 1/2) / 2 and 3
    assert stats["rollout_is_seq_mean"] == pytest.approx(4.25 / 2)
    assert stats["rollout_is_seq_std"] == pytest.approx((3 - 1.25) / math.sqrt(2))
    assert (stats["rollout_is_seq_max"], stats["rollout_is_seq_max_deviation"]) == (3.0, 2.0)
    assert "rollout_is_oob_ratio" not in stats


def test_weight_statistics_of_sequences_count_rows_and_two_bounds_count_tokens():
    stats = stats_of("sequence", 3.0, 0.5)  # ratios 1 (two tokens) and 4, of which 4 becomes 0
    assert stats["rollout_is_ratio_fraction_high"] == 0.5
    assert stats["rollout_is_oob_ratio"] == pytest.approx(1 / 3)
    assert stats["rollout_is_max"] == 1.0 and stats["rollout_is_raw_max"] == pytest.approx(4.0)
    assert stats["rollout_is_seq_min"] == 0.0
    # of the ratios, not of the weights, which are never above the threshold
    assert (stats["rollout_is_seq_fraction_high"], stats["rollout_is_seq_fraction_low"]) == (0.5, 0.0)


# -- rejections


def test_a_token_is_kept_within_the_bounds_of_its_own_divergence():
    # log-ratios ln 2, -ln 2 | 2 ln 2. k1: exp(-l) = 1/2, 2 | 1/4
    assert kept(Rejection("token_k1", 2.1)) == [[True, True], [False, False]]
    assert kept(Rejection("token_k1", 2.1, 0.6)) == [[False, True], [False, False]]
    # k2 = l^2 / 2 = 0.24, 0.24 | 0.96
    assert kept(Rejection("token_k2", 0.25)) == [[True, True], [False, False]]
    # k3 = exp(l) - 1 - l = 0.307, 0.193 | 1.614
    assert kept(Rejection("token_k3", 0.2)) == [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("seq_sum_k2", 2 * LN2**2 / 2),
        ("seq_mean_k2", LN2**2 / 2),
        ("seq_max_k2", LN2**2 / 2),
        ("seq_sum_k3", 0.5),  # (2 - 1 - ln 2) + (1/2 - 1 + ln 2)
        ("seq_mean_k3", 0.25),
        ("seq_max_k3", 1 - LN2),
    ],
)
def test_a_sequence_is_kept_or_rejected_as_a_whole(kind, value):
    first = torch.tensor([[1, 1], [0, 0]])
    for bound, is_kept in ((value * 1.001, True), (value * 0.999, False)):
        found = rejection_mask(OLD, ROLLOUT, first, [Rejection(kind, bound)])
        assert found.tolist() == [[is_kept, is_kept], [False, False]]


def test_k1_of_a_sequence_is_its_ratio_and_its_mean_the_geometric_mean():
    # products of the ratios 1 | 4; their inverse 1 | 1/4
    assert kept(Rejection("seq_sum_k1", 3.9)) == [[True, True], [False, False]]
    assert kept(Rejection("seq_sum_k1", 1.5, 0.24)) == [[True, True], [True, False]]
    # geometric means of ratios 2 and 8 (their product 16): 4
    old, both = torch.tensor([[math.log(2), math.log(8)]]), torch.ones(1, 2)
    for bound, is_kept in ((4.01, True), (3.99, False)):
        found = rejection_mask(old, torch.zeros(1, 2), both, [Rejection("seq_mean_k1", bound)])
        assert found.tolist() == [[is_kept, is_kept]]


def test_all_rejections_must_keep_a_token():
    first, second = Rejection("token_k3", 0.2), Rejection("token_k1", 2.1, 0.6)
    assert kept(first, second) == [[False, True], [False, False]] == kept(second, first)
    assert kept() == MASK.bool().tolist()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_policies_are_never_rejected_and_padding_and_order_change_nothing(kind):
    torch.manual_seed(0)
    old, rollout = torch.randn(2, 6, 5)
    mask = torch.arange(5) < torch.tensor([[5], [4], [3], [2], [1], [0]])
    bound = [Rejection(kind, 1.5)]
    assert torch.equal(rejection_mask(old, old, mask, bound), mask)
    plain, order = rejection_mask(old, rollout, mask, bound), torch.randperm(6)
    padded = (torch.nn.functional.pad(x[order], (0, 3), value=v) for x, v in ((old, math.nan), (rollout, 9), (mask, 0)))
    assert torch.equal(rejection_mask(*padded, bound)[:, :5], plain[order])
    half = [rejection_mask(old[rows], rollout[rows], mask[rows], bound) for rows in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.cat(half), plain)


def test_rejection_statistics_count_tokens_rows_and_each_kind():
    stats = rejection_stats(*SAMPLES, [Rejection("token_k3", 0.2), Rejection("seq_mean_k3", 0.3)])
    assert stats["rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert stats["rollout_rs_seq_masked_fraction"] == 1.0
    assert stats["rollout_rs_seq_mean_k3_masked_fraction"] == pytest.approx(1 / 3)
    assert stats["rollout_rs_seq_mean_k3_seq_masked_fraction"] == 0.5
    assert stats["rollout_rs_seq_mean_k3_seq_mean"] == pytest.approx((0.25 + 3 - 2 * LN2) / 2)
    assert stats["rollout_rs_token_k3_max"] == pytest.approx(3 - 2 * LN2)
    assert stats["rollout_rs_token_k3_fraction_high"] == pytest.approx(2 / 3)


def test_settings_and_formulas_know_the_same_kinds():
    assert set(REJECTION_KINDS) == set(DIVERGENCES)


# -- mismatch


def test_the_mismatch_of_the_policies():
    stats = mismatch_stats(*SAMPLES)
    assert stats["kl"] == pytest.approx(-2 * LN2 / 3)
    assert stats["k3_kl"] == pytest.approx((6.5 - 2 * LN2) / 3 - 1)
    # rows: geometric means of 0.4 and 0.1, and 0.8; of 0.2 and 0.2, and 0.2
    assert stats["training_ppl"] == pytest.approx((5.0 + 1.25) / 2)
    assert stats["rollout_ppl"] == pytest.approx(5.0)
    assert stats["training_log_ppl"] == pytest.approx((math.log(5) + math.log(1.25)) / 2)
    assert stats["rollout_log_ppl"] == pytest.approx(math.log(5))
    assert stats["log_ppl_diff"] == pytest.approx(-LN2) == pytest.approx(-stats["log_ppl_abs_diff"])
    assert stats["log_ppl_diff_max"] == pytest.approx(0, abs=1e-6)
    assert stats["log_ppl_diff_min"] == pytest.approx(-2 * LN2)
    assert stats["ppl_ratio"] == pytest.approx((1 + 0.25) / 2)
    assert stats["chi2_token"] == pytest.approx((4 + 0.25 + 16) / 3 - 1)
    assert stats["chi2_seq"] == pytest.approx((1 + 16) / 2 - 1)
    assert stats["eff_sample_size"] == pytest.approx(6.5**2 / (3 * 20.25))


def test_statistics_do_not_read_empty_rows_or_padding():
    more = [
        torch.nn.functional.pad(x, (0, 2, 0, 1), value=v) for x, v in ((OLD, math.nan), (ROLLOUT, math.inf), (MASK, 0))
    ]
    assert mismatch_stats(*more) == pytest.approx(mismatch_stats(*SAMPLES))
    assert stats_of("sequence", 3.0, samples=more) == pytest.approx(stats_of("sequence", 3.0))
    bounds = [Rejection("seq_max_k3", 0.5), Rejection("token_k1", 2.0)]
    assert rejection_stats(*more, bounds) == pytest.approx(rejection_stats(*SAMPLES, bounds))


def test_an_empty_mask_gives_no_statistics_of_weights_and_nan_for_the_mismatch():
    empty = (OLD, ROLLOUT, torch.zeros_like(MASK))
    assert stats_of("token", 2.0, samples=empty) == {} == rejection_stats(*empty, [Rejection("token_k1", 2.0)])
    assert all(math.isnan(value) for value in mismatch_stats(*empty).values())


def test_large_differences_stay_finite():
    assert torch.isfinite(rollout_is_weights(OLD, OLD - 1e4, MASK, level="sequence", threshold=1e30)).all()
    assert all(math.isfinite(value) for value in mismatch_stats(OLD, OLD - 1e4, MASK).values() if value < 1e4)


# -- the decoupled form


def test_weights_times_ppos_ratio_are_the_ratio_to_the_behaviour_policy():
    """Decoupled PPO, arXiv:2505.24298: pi_old / pi_rollout * pi / pi_old = pi / pi_rollout, without limits."""
    torch.manual_seed(0)
    new, old, rollout = torch.randn(3, 4, 6, dtype=torch.float64) * 0.3
    mask = torch.ones(4, 6)
    weight = rollout_is_weights(old, rollout, mask, level="token", threshold=1e6)
    torch.testing.assert_close(weight * (new - old).exp(), (new - rollout).exp())


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="level='word' is not known; known are token, sequence"):
        weights("word", 2.0)
    with pytest.raises(ValueError, match="threshold=0"):
        weights("token", 0)
    with pytest.raises(ValueError, match="lower=3.0.* above 0.* threshold=2"):
        weights("token", 2.0, 3.0)
    with pytest.raises(ValueError, match="kind='token_k4' is not known; known are token_k1"):
        kept(Rejection("token_k4", 2.0))
    with pytest.raises(DataError, match="rollout_log_probs"):
        log_ratio(OLD, ROLLOUT[:1], MASK)
