"""The further policy losses: numbers worked out by hand, identities, gradients, and values off the mask."""

import math

import pytest
import torch

from hybridrl.algos.policy_losses import get_policy_loss
from hybridrl.errors import ConfigError

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}
SETTINGS = {"dro": {"dro_beta": 0.5}}
REINFORCE_AT_1 = ("gpg", "cispo", "topr", "dppo_tv", "dppo_kl", "sapo", "dro", "vanilla")
F64 = torch.float64


def losses(name, log_probs, old, advantages, mask=None, **kwargs):
    mask = torch.ones_like(advantages) if mask is None else mask
    return get_policy_loss(name)(log_probs, old, advantages, mask, **CLIP, **SETTINGS.get(name, {}), **kwargs)


def rows(name, ratios, advantages, old=-1.0, **kwargs):
    """Return the result and the gradient for one row whose old log-prob is `old` everywhere."""
    old_BT = torch.full((1, len(ratios)), old, dtype=F64)
    log_probs_BT = (old_BT + torch.tensor([ratios], dtype=F64).log()).requires_grad_()
    result = losses(name, log_probs_BT, old_BT, torch.tensor([advantages], dtype=F64), **kwargs)
    result.losses_BT.sum().backward()
    return result, log_probs_BT.grad[0].tolist()


@pytest.mark.parametrize("name", REINFORCE_AT_1)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    result, gradient = rows(name, [1.0, 1.0, 1.0], [0.5, -1.5, 2.0])
    assert gradient == pytest.approx([-0.5, 1.5, -2.0])
    assert not result.clipped_BT.any() and not result.clipped_lower_BT.any()


def test_gpg_ignores_the_ratio():
    assert rows("gpg", [3.0, 0.1], [2.0, -1.0])[1] == pytest.approx([-2.0, 1.0])


def test_cispo_limits_the_weight_and_keeps_the_gradient():
    result, gradient = rows("cispo", [1.1, 2.0, 0.5], [2.0, 2.0, -2.0])
    assert gradient == pytest.approx([-2.2, -2.6, 1.6])
    assert result.clipped_BT[0].tolist() == [False, True, True]
    assert result.losses_BT[0, 0].item() == pytest.approx(-2.2 * (math.log(1.1) - 1))


def test_topr_fades_bad_samples_only():
    assert rows("topr", [2.0, 0.5, 0.5], [1.0, 1.0, 1.0])[1] == pytest.approx([-1.0, -1.0, -1.0])
    result, gradient = rows("topr", [2.0, 0.5, 0.5], [-1.0, -1.0, -1.0])  # the sequence's ratio is 0.5
    assert gradient == pytest.approx([0.5, 0.5, 0.5]) and not result.clipped_BT.any()
    result, gradient = rows("topr", [2.0, 2.0], [-1.0, -1.0])
    assert gradient == pytest.approx([1.0, 1.0]) and result.clipped_BT.all()


def test_dppo_tv_bounds_the_change_of_the_probability():
    old = math.log(0.5)
    # p - p_old: 0.25, 0.35 (above 0.3), -0.15, -0.25 (below -0.2), and 0.35 away from where A < 0 pushes
    result, gradient = rows("dppo_tv", [1.5, 1.7, 0.7, 0.5, 1.7], [1.0, 1.0, -1.0, -1.0, -1.0], old=old)
    assert result.clipped_BT[0].tolist() == [False, True, False, True, False]
    assert gradient == pytest.approx([-1.5, 0.0, 0.7, 0.0, 1.7])
    rare, gradient = rows("dppo_tv", [100.0], [1.0], old=math.log(0.001))  # 0.001 to 0.1: inside, the weight is 20
    assert gradient == pytest.approx([-20.0]) and not rare.clipped_BT.any()


def test_dppo_kl_bounds_the_binary_kl():
    def divergence(p_old, p):
        return p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))

    ratios = [1.1, 1.9, 0.9, 0.3]
    inside = [divergence(0.5, 0.5 * r) for r in ratios]
    assert inside[0] < 0.3 < inside[1] and inside[2] < 0.2 < inside[3]
    result, gradient = rows("dppo_kl", ratios, [1.0, 1.0, -1.0, -1.0], old=math.log(0.5))
    assert result.clipped_BT[0].tolist() == [False, True, False, True]
    assert gradient == pytest.approx([-1.1, 0.0, 0.9, 0.0])


def test_sapo_numbers_worked_out_by_hand():
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    result, gradient = rows("sapo", [1.5, 1.5], [2.0, -2.0])
    assert result.losses_BT[0].tolist() == pytest.approx([-2 * 4 * sigmoid(0.5), 2 * 4 / 1.05 * sigmoid(1.05 * 0.5)])
    # d/dlogp of (4 / tau) s(tau (r - 1)) is 4 s (1 - s) r
    expected = [-2 * 4 * s * (1 - s) * 1.5 for s in (sigmoid(0.5), sigmoid(1.05 * 0.5))]
    assert gradient == pytest.approx([expected[0], -expected[1]])
    assert abs(rows("sapo", [30.0], [1.0])[1][0]) < 1e-9
    with pytest.raises(ConfigError, match="policy_loss.tau_neg=0 must be above 0"):
        rows("sapo", [1.0], [1.0], tau_neg=0)


def test_dro_numbers_worked_out_by_hand():
    result, gradient = rows("dro", [2.0], [3.0])
    assert result.losses_BT[0].tolist() == pytest.approx([-(3 * (math.log(2) - 1) - 0.25 * math.log(2) ** 2)])
    assert gradient == pytest.approx([-3 + 0.5 * math.log(2)])
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match="policy_loss.dro_beta=None must be a number above 0"):
        get_policy_loss("dro")(one, one, one, one, **CLIP)


def test_geo_mean_numbers_worked_out_by_hand():
    result, gradient = rows("geo_mean", [1.1, 0.9], [2.0, 2.0])
    ratio = math.exp((math.log(1.1) + math.log(0.9)) / 2)
    assert result.losses_BT[0].tolist() == pytest.approx([-2 * ratio] * 2)
    assert gradient == pytest.approx([-2 * ratio, -2 * ratio])  # the sum of two equal losses, each / 2 per token
    result, gradient = rows("geo_mean", [2.0, 0.9], [2.0, 2.0])  # log 2 is limited to 0.3
    assert result.losses_BT[0, 0].item() == pytest.approx(-2 * math.exp((0.3 + math.log(0.9)) / 2))
    assert result.clipped_BT[0].tolist() == [True, False] and gradient[0] == 0
    result, _ = rows("geo_mean", [2.0, 0.5], [-1.0, -1.0])  # for A < 0 it limits from below
    assert result.losses_BT[0, 0].item() == pytest.approx(math.exp((math.log(2.0) - 0.2) / 2))


def test_geo_mean_of_one_token_inside_the_range_is_ppo():
    ratios, advantages = [1.1], [-2.0]
    assert rows("geo_mean", ratios, advantages)[1] == pytest.approx(rows("vanilla", ratios, advantages)[1])


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl"])
def test_inside_the_clip_range_the_gradient_is_that_of_ppo(name):
    # -r A for each token: of PPO by the ratio, here by a weight without gradient
    ratios, advantages = [1.05, 0.95, 1.1, 0.9], [2.0, 2.0, -1.0, -1.0]
    result, gradient = rows(name, ratios, advantages)
    assert gradient == pytest.approx(rows("vanilla", ratios, advantages)[1])
    assert gradient == pytest.approx([-r * a for r, a in zip(ratios, advantages, strict=True)])
    assert not result.clipped_BT.any()


def test_topr_of_good_samples_is_gpg_and_dro_pulls_back_to_the_old_policy():
    ratios, advantages = [3.0, 0.1], [2.0, 1.0]
    assert rows("topr", ratios, advantages)[1] == pytest.approx(rows("gpg", ratios, advantages)[1])
    # without an advantage dro is a least-squares fit of the old log-probs: beta log r
    assert rows("dro", ratios, [0.0, 0.0])[1] == pytest.approx([0.5 * math.log(r) for r in ratios])
