"""ReMax, MaxRL, GDPO, VAPO and the optimal token baseline: hand-worked numbers, identities, independent loops."""

import pytest
import torch

from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.algos.advantages.discounting import discounted_sum_to_go
from hybridrl.algos.masked import masked_whiten
from hybridrl.errors import DataError

F64 = torch.float64


def on_last_token(scores, lengths, num_tokens=None):
    """Return rewards and mask of rows with these scores on their last token."""
    mask_BT = (torch.arange(num_tokens or max(lengths)) < torch.tensor(lengths)[:, None]).long()
    rewards_BT = torch.zeros(mask_BT.shape, dtype=F64)
    rewards_BT[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores, dtype=F64)
    return rewards_BT, mask_BT


def first_tokens(name, scores, groups=None, **more):
    rewards_BT, mask_BT = on_last_token(scores, [1] * len(scores))
    group_B = torch.tensor(groups or [0] * len(scores))
    return get_adv_estimator(name)(rewards_BT, mask_BT, group_B=group_B, **more)[0][:, 0].tolist()


# --- sums over time


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200, 64 * 64 + 1])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99, 1.0])
def test_discounted_sums_equal_a_loop(num_tokens, decay):
    terms_bT = torch.randn(3, num_tokens, dtype=F64)
    expected, following = torch.zeros_like(terms_bT), torch.zeros(3, dtype=F64)
    for t in reversed(range(num_tokens)):
        expected[:, t] = following = terms_bT[:, t] + decay * following
    torch.testing.assert_close(discounted_sum_to_go(terms_bT, decay), expected)
    decay_b = torch.tensor([decay, 0.5, 1.0], dtype=F64)
    by_row = discounted_sum_to_go(terms_bT, decay_b)
    torch.testing.assert_close(by_row[0], expected[0])
    torch.testing.assert_close(by_row[2], terms_bT[2].flip(0).cumsum(0).flip(0))


# --- ReMax


def test_remax_subtracts_the_greedy_score_from_every_reward_to_go():
    rewards_BT = torch.tensor([[0.25, 0.0, 1.0, 9.0]])
    advantages_BT, returns_BT = get_adv_estimator("remax")(
        rewards_BT, torch.tensor([[1, 1, 1, 0]]), baseline_B=torch.tensor([0.5])
    )
    assert returns_BT.tolist() == [[1.25, 1.0, 1.0, 0.0]]
    assert advantages_BT.tolist() == [[0.75, 0.5, 0.5, 0.0]]


def test_remax_with_baseline_0_is_reinforce():
    rewards_BT, mask_BT = torch.randn(6, 5, dtype=F64), torch.rand(6, 5) < 0.7
    remax_BT, _ = get_adv_estimator("remax")(rewards_BT, mask_BT, baseline_B=torch.zeros(6))
    _, reward_to_go_BT = get_adv_estimator("reinforce_plus_plus")(rewards_BT, mask_BT)
    torch.testing.assert_close(remax_BT, reward_to_go_BT)


def test_remax_needs_its_baseline():
    with pytest.raises(DataError, match="'remax' needs the reward of a greedy response"):
        get_adv_estimator("remax")(torch.zeros(1, 2), torch.ones(1, 2))


# --- MaxRL


def test_maxrl_gives_a_right_answer_n_over_k_minus_1_and_a_wrong_one_minus_1():
    # n = 4: k = 1, k = 2, none, all
    scores = [1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    groups = [row // 4 for row in range(16)]
    expected = [3, -1, -1, -1, 1, 1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert first_tokens("maxrl", scores, groups) == expected


def test_maxrl_is_dr_grpo_divided_by_the_mean():
    scores = [0.5, 2.0, 0.5, 1.0]
    centred = first_tokens("grpo", scores, norm_by_std=False)
    assert first_tokens("maxrl", scores) == pytest.approx([advantage / 1.0 for advantage in centred])


def test_maxrl_refuses_a_negative_score_but_not_of_a_failed_row():
    with pytest.raises(DataError, match="score is -1.* 0 or more"):
        first_tokens("maxrl", [1, -1])
    assert first_tokens("maxrl", [1, -1, 0], valid_B=torch.tensor([True, False, True])) == [1, 0, -1]


# --- GDPO


def test_gdpo_numbers_worked_out_by_hand():
    # rewards 0, 2 and 0, 4 and 1, 1: of the first two each is -+1/sqrt 2, of the third 0; weights 1, 2, 5
    components_BK = torch.tensor([[0.0, 4.0, 1.0], [2.0, 0.0, 1.0]])
    # -0.7071 + 2 * 0.7071 = 0.7071 and its opposite: mean 0, unbiased variance 1, so whitening changes nothing
    found = first_tokens("gdpo", [0, 0], components_BK=components_BK, component_weights=(1.0, 2.0, 5.0))
    assert found == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_gdpo_of_one_reward_is_grpo_whitened_over_tokens():
    rewards_BT, mask_BT = on_last_token([1.0, 3.0, 2.0, 5.0, 0.0, 7.0], [2, 5, 1, 4, 3, 3])
    group_B = torch.tensor([0, 0, 0, 1, 1, 1])
    grpo_BT, _ = get_adv_estimator("grpo")(rewards_BT, mask_BT, group_B=group_B)
    gdpo_BT, _ = get_adv_estimator("gdpo")(
        rewards_BT, mask_BT, group_B=group_B, components_BK=rewards_BT.sum(1, keepdim=True)
    )
    torch.testing.assert_close(gdpo_BT, masked_whiten(grpo_BT, mask_BT))


def test_gdpo_tells_apart_what_has_the_same_sum():
    # sums 2, 1, 0 in both groups, of two rewards in the first and of one in the second
    components_BK = torch.tensor([[1.0, 1], [1, 0], [0, 0], [2, 0], [1, 0], [0, 0]])
    scores, groups = [2, 1, 0, 2, 1, 0], [0, 0, 0, 1, 1, 1]
    grpo, gdpo = first_tokens("grpo", scores, groups), first_tokens("gdpo", scores, groups, components_BK=components_BK)
    assert grpo[:3] == grpo[3:]
    # before whitening sqrt 3 and 1
    assert gdpo[0] / gdpo[3] == pytest.approx(3**0.5, abs=1e-5)


def test_gdpo_refuses_another_number_of_weights():
    with pytest.raises(DataError, match="1 weights .* for 2 rewards"):
        first_tokens("gdpo", [0, 0], components_BK=torch.zeros(2, 2), component_weights=(1.0,))


# --- VAPO


def test_vapo_uses_a_lambda_by_length_for_advantages_and_lam_for_returns():
    rewards_BT, mask_BT = on_last_token([1.0, 1.0], [40, 80])
    values_BT = torch.randn(2, 80, dtype=F64)
    advantages_BT, returns_BT = get_adv_estimator("vapo")(rewards_BT, mask_BT, values_BT=values_BT, gamma=0.9)
    # alpha 0.05: lambda = 1 - 1 / (0.05 * 40) = 0.5 and 1 - 1 / (0.05 * 80) = 0.75
    plain_BT = torch.zeros(2, 80, dtype=F64)
    for row, (length, lam) in enumerate([(40, 0.5), (80, 0.75)]):
        carried = 0.0
        for t in reversed(range(length)):
            following = float(values_BT[row, t + 1]) if t + 1 < length else 0.0
            carried = float(rewards_BT[row, t] + 0.9 * following - values_BT[row, t]) + 0.9 * lam * carried
            plain_BT[row, t] = carried
    torch.testing.assert_close(advantages_BT, masked_whiten(plain_BT, mask_BT))
    _, gae_returns_BT = get_adv_estimator("gae")(rewards_BT, mask_BT, values_BT=values_BT, gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns_BT, gae_returns_BT)


def test_vapo_of_a_very_long_alpha_is_gae_with_lambda_1():
    rewards_BT, mask_BT = on_last_token([1.0, -2.0, 0.5], [3, 1, 5])
    values_BT = torch.randn(3, 5, dtype=F64)
    for ours, theirs in zip(
        get_adv_estimator("vapo")(rewards_BT, mask_BT, values_BT=values_BT, lam_alpha=1e12),
        get_adv_estimator("gae")(rewards_BT, mask_BT, values_BT=values_BT),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


# --- the optimal token baseline


def token_baseline(rewards_BT, mask_BT, *, name="optimal_token_baseline", pi, squares, groups=None, weights=None):
    return get_adv_estimator(name)(
        rewards_BT,
        mask_BT,
        group_B=torch.tensor(groups or [0] * len(rewards_BT)),
        old_log_probs_BT=pi.log(),
        sum_pi_squared_BT=squares,
        is_weights_BT=weights,
    )[0]


def test_the_token_baseline_of_numbers_worked_out_by_hand():
    rewards_BT, mask_BT = on_last_token([1.0, 3.0], [2, 2], num_tokens=3)
    pi = torch.tensor([[0.5, 0.5, 1.0], [0.8, 0.5, 1.0]], dtype=F64)
    squares = torch.tensor([[0.5, 0.5, 1.0], [0.68, 0.5, 1.0]], dtype=F64)
    # 1 - 2 pi + sum: row 0: 0.5, 0.5, cumulated 0.5, 1.0; row 1: 0.08, 0.5, cumulated 0.08, 0.58
    # b_0 = (0.5 + 3 * 0.08) / 0.58 = 1.27586; b_1 = (1 + 3 * 0.58) / 1.58 = 1.73418
    expected = torch.tensor([[-0.27586, -0.73418, 0], [1.72414, 1.26582, 0]], dtype=F64)
    torch.testing.assert_close(token_baseline(rewards_BT, mask_BT, pi=pi, squares=squares), expected, atol=1e-5, rtol=0)
    # importance weights 2 and 1: row 0 has 2, 4 instead of 0.5, 1: b_0 = (2 + 0.24) / 2.08 = 1.07692
    weights = torch.tensor([[2.0] * 3, [1.0] * 3], dtype=F64)
    found = token_baseline(rewards_BT, mask_BT, pi=pi, squares=squares, weights=weights)
    assert found[:, 0].tolist() == pytest.approx([1 - 1.0769231, 3 - 1.0769231])


def test_with_equal_weights_the_token_baseline_is_the_mean_of_the_group():
    rewards_BT, mask_BT = on_last_token([1.0, 0.0, 4.0, 2.0], [3, 3, 3, 3])
    pi, squares = torch.full((4, 3), 0.5, dtype=F64), torch.full((4, 3), 0.5, dtype=F64)
    found = token_baseline(rewards_BT, mask_BT, pi=pi, squares=squares, groups=[0, 0, 1, 1])
    torch.testing.assert_close(found[:, 0], torch.tensor([0.5, -0.5, 1, -1], dtype=F64))


def test_where_one_row_alone_has_a_token_its_baseline_is_0():
    rewards_BT, mask_BT = on_last_token([2.0, 1.0], [3, 1])
    pi, squares = torch.full((2, 3), 0.5, dtype=F64), torch.full((2, 3), 0.5, dtype=F64)
    assert token_baseline(rewards_BT, mask_BT, pi=pi, squares=squares)[0].tolist() == pytest.approx([0.5, 2.0, 2.0])


def test_the_tool_variant_counts_tokens_of_the_policy_only():
    # rows 1 1 0 0 1 and 1 1 1: with the gap closed both have tokens 0, 1 and 2
    mask_BT = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]])
    rewards_BT = torch.tensor([[0, 0, 9, 9, 1.0], [0, 0, 3.0, 0, 0]], dtype=F64)
    pi, squares = torch.rand(2, 5, dtype=F64) * 0.5 + 0.3, torch.rand(2, 5, dtype=F64) * 0.5 + 0.5
    found = token_baseline(rewards_BT, mask_BT, name="tir_optimal_token_baseline", pi=pi, squares=squares)
    tight = [torch.stack([x[0, [0, 1, 4]], x[1, :3]]) for x in (rewards_BT, pi, squares)]
    plain = token_baseline(tight[0], torch.ones(2, 3), pi=tight[1], squares=tight[2])
    torch.testing.assert_close(found[0, [0, 1, 4]], plain[0])
    torch.testing.assert_close(found[1, :3], plain[1])
    assert found[0, 2:4].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_token_baseline_equals_a_loop_over_positions(name):
    torch.manual_seed(3)
    rewards_BT, mask_BT = on_last_token([1.0, 2.0, 0.0, 5.0, 4.0], [4, 2, 6, 6, 1])
    pi, squares = torch.rand(5, 6, dtype=F64) * 0.5 + 0.3, torch.rand(5, 6, dtype=F64) * 0.5 + 0.5
    groups = [0, 0, 0, 1, 2]
    found = token_baseline(rewards_BT, mask_BT, name=name, pi=pi, squares=squares, groups=groups)
    to_go = rewards_BT.flip(1).cumsum(1).flip(1)
    weight = ((1 - 2 * pi + squares) * mask_BT).cumsum(1)
    for i in range(5):
        for t in range(6):
            rows = [j for j in range(5) if groups[j] == groups[i] and mask_BT[j, t]]
            total = sum(float(weight[j, t]) for j in rows)
            baseline = sum(float(to_go[j, t] * weight[j, t]) for j in rows) / total if len(rows) > 1 else 0.0
            assert float(found[i, t]) == pytest.approx((float(to_go[i, t]) - baseline) * int(mask_BT[i, t]), abs=1e-6)
