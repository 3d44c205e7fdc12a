"""KL estimators, the KL in the reward, and the controllers of its coefficient."""

import math

import pytest
import torch

from hybridrl.algos.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty, kl_penalty
from hybridrl.errors import CheckpointError, ConfigError, DataError


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        # log-prob minus reference: ln 2, -ln 2, 0
        (("kl", "k1"), [math.log(2), -math.log(2), 0.0]),
        (("abs",), [math.log(2), math.log(2), 0.0]),
        (("mse", "k2"), [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0]),
        # exp(-d) - 1 + d: 1/2 - 1 + ln 2, 2 - 1 - ln 2
        (("low_var_kl", "k3"), [math.log(2) - 0.5, 1 - math.log(2), 0.0]),
    ],
)
def test_numbers_worked_out_by_hand(kinds, expected):
    log_probs, ref_log_probs = (
        torch.tensor([-1.0, -1.0 - math.log(2), -3.0]),
        torch.tensor([-1.0 - math.log(2), -1.0, -3.0]),
    )
    for kind in kinds:
        assert kl_penalty(log_probs, ref_log_probs, kind).tolist() == pytest.approx(expected, abs=1e-6)


def test_k3_is_never_negative_however_small_the_difference():
    difference = torch.cat([torch.logspace(-12, 2, 2000), -torch.logspace(-12, 2, 2000)])
    k3 = kl_penalty(difference, torch.zeros_like(difference), "k3")
    assert k3.min() >= 0
    assert k3.max() <= 10
    small = (difference.abs() > 1e-4) & (difference.abs() < 1e-2)
    torch.testing.assert_close(k3[small], difference[small] ** 2 / 2, rtol=1e-2, atol=0)


def test_k1_and_k3_are_unbiased_for_the_kl_of_two_categorical_distributions():
    torch.manual_seed(0)
    p_V, q_V = torch.randn(2, 6, dtype=torch.float64).softmax(dim=-1)
    exact = (p_V * (p_V / q_V).log()).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p_V * kl_penalty(p_V.log(), q_V.log(), kind)).sum(), exact)


def test_gradients_are_those_of_the_formula():
    for kind, derivative in (("k1", 1.0), ("abs", 1.0), ("k2", 0.7), ("k3", 1 - math.exp(-0.7))):
        log_probs = torch.tensor([0.7], requires_grad=True)
        kl_penalty(log_probs, torch.zeros(1), kind).sum().backward()
        assert log_probs.grad.item() == pytest.approx(derivative, abs=1e-6)


def test_k3_of_an_extreme_difference_is_limited_and_has_finite_gradients():
    log_probs = torch.tensor([-500.0, 500.0], requires_grad=True)
    k3 = kl_penalty(log_probs, torch.zeros(2), "low_var_kl")
    k3.sum().backward()
    assert k3.tolist() == [10, 10]  # the second is exp(-20) - 1 + 20 = 19
    assert torch.isfinite(log_probs.grad).all()


def test_the_kl_is_taken_from_the_reward_on_the_mask_only():
    nan = float("nan")
    scores_BT = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    log_probs_BT = torch.tensor([[-1.0, -2.0, nan], [-3.0, nan, nan], [nan, nan, nan]])
    ref_BT = torch.tensor([[-2.0, -5.0, nan], [-2.5, nan, nan], [nan, nan, nan]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards_BT, mean_kl = apply_kl_penalty(scores_BT, log_probs_BT, ref_BT, mask_BT, coef=0.1, kind="kl")
    # KL 1, 3 (row mean 2) and -0.5 (row mean -0.5); the row without tokens does not count: 1.5 / 2
    torch.testing.assert_close(rewards_BT, torch.tensor([[-0.1, 0.7, 0.0], [2.05, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert mean_kl == pytest.approx(0.75)
    assert scores_BT[0].tolist() == [0, 1, 0]


def test_a_coefficient_of_0_or_an_unchanged_policy_leaves_the_reward():
    torch.manual_seed(0)
    scores_BT, log_probs_BT, ref_BT = torch.randn(3, 4, 5)
    mask_BT = torch.ones(4, 5)
    assert torch.equal(apply_kl_penalty(scores_BT, log_probs_BT, ref_BT, mask_BT, coef=0.0, kind="k3")[0], scores_BT)
    rewards_BT, mean_kl = apply_kl_penalty(scores_BT, log_probs_BT, log_probs_BT, mask_BT, coef=0.5, kind="k3")
    assert torch.equal(rewards_BT, scores_BT)
    assert mean_kl == 0


def test_the_adaptive_controller_steers_towards_the_target_with_limited_steps():
    controller = AdaptiveKLController(0.1, target_kl=2.0, horizon=1000)
    controller.update(2.2, n_steps=100)  # error 0.1: 0.1 * (1 + 0.1 * 100 / 1000)
    assert controller.value == pytest.approx(0.101)
    controller.update(50.0, n_steps=500)  # error limited to 0.2: * 1.1
    assert controller.value == pytest.approx(0.1111)
    controller.update(0.0, n_steps=500)  # error limited to -0.2: * 0.9
    assert controller.value == pytest.approx(0.09999)
    controller.update(2.0, n_steps=500)
    assert controller.value == pytest.approx(0.09999)


def test_a_restored_adaptive_controller_continues_as_if_never_stopped():
    straight, first = (AdaptiveKLController(0.1, target_kl=1.0, horizon=50) for _ in range(2))
    first.update(0.3, n_steps=8)
    restored = AdaptiveKLController(9.0, target_kl=1.0, horizon=50)
    restored.load_state_dict(first.state_dict())
    straight.update(0.3, n_steps=8)
    for controller in (straight, restored):
        controller.update(1.7, n_steps=8)
    assert restored.value == straight.value


def test_the_fixed_controller_keeps_its_setting():
    controller = FixedKLController(0.01)
    controller.update(100.0, n_steps=1000)
    controller.load_state_dict({"value": 3.0})
    assert controller.value == 0.01
    assert controller.state_dict() == {}


def test_refusals_name_the_problem():
    ones = torch.ones(2, 2)
    with pytest.raises(ConfigError, match="kl_penalty='low_var'.*did you mean 'low_var_kl'"):
        kl_penalty(ones, ones, "low_var")
    with pytest.raises(DataError, match="same shape"):
        kl_penalty(ones, ones[:, :1], "k1")
    with pytest.raises(DataError, match="KL to the reference policy is nan"):
        AdaptiveKLController(0.1, target_kl=1.0, horizon=10).update(float("nan"), n_steps=1)
    with pytest.raises(CheckpointError, match="kl_ctrl.type"):
        AdaptiveKLController(0.1, target_kl=1.0, horizon=10).load_state_dict(FixedKLController(0.1).state_dict())


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "k2", "low_var_kl", "k3"])
def test_a_straight_through_kind_has_its_own_value_and_the_gradient_of_k2(kind):
    reference = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    log_probs = torch.tensor([-1.5, -0.2, -0.5], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(log_probs, reference, f"{kind}+")
    torch.testing.assert_close(value, kl_penalty(log_probs, reference, kind))
    value.sum().backward()
    torch.testing.assert_close(log_probs.grad, (log_probs - reference).detach())
