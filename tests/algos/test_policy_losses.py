"""Policy losses: numbers worked out by hand, gradients, and values off the mask."""

import math

import pytest
import torch

from hybridrl.algos.policy_losses import POLICY_LOSSES, get_policy_loss, gspo, register_policy_loss, vanilla
from hybridrl.errors import ConfigError, DataError

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}
SETTINGS = {"dro": {"dro_beta": 0.5}}


def one_row(ratios: list[float], advantages: list[float], loss_fn=vanilla, **clip):
    log_probs_BT = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    advantages_BT = torch.tensor([advantages], dtype=torch.float64)
    zeros_BT, mask_BT = torch.zeros_like(advantages_BT), torch.ones_like(advantages_BT)
    result = loss_fn(log_probs_BT, zeros_BT, advantages_BT, mask_BT, **{**CLIP, **clip})
    result.losses_BT.sum().backward()
    return result, log_probs_BT.grad[0]


def test_vanilla_numbers_worked_out_by_hand():
    # A = 2: r 1 -> -2; r 1.5 -> clipped at 1.3: -2.6; r 0.5 -> max(-1, -1.6) = -1
    # A = -2: r 0.5 -> max(1, 2 * 0.8) = 1.6 clipped; r 1.5 -> 3; r 4 -> max(8, 2.6) = 8, dual clip at 3 * 2 = 6
    result, grad_T = one_row([1.0, 1.5, 0.5, 0.5, 1.5, 4.0], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    assert result.losses_BT[0].tolist() == pytest.approx([-2.0, -2.6, -1.0, 1.6, 3.0, 6.0])
    assert result.clipped_BT[0].tolist() == [False, True, False, True, False, False]
    assert result.clipped_lower_BT[0].tolist() == [False, False, False, False, False, True]
    assert result.approx_kl_BT[0].tolist() == pytest.approx([-math.log(r) for r in (1.0, 1.5, 0.5, 0.5, 1.5, 4.0)])
    # d(-A r) / dlogp = -A r where nothing is clipped, 0 where it is
    assert grad_T.tolist() == pytest.approx([-2.0, 0.0, -1.0, 0.0, 3.0, 0.0])


def test_on_policy_the_vanilla_gradient_is_that_of_reinforce():
    advantages = [0.5, -1.5, 2.0]
    result, grad_T = one_row([1.0, 1.0, 1.0], advantages)
    assert grad_T.tolist() == pytest.approx([-a for a in advantages])
    assert not result.clipped_BT.any()


def test_gspo_numbers_worked_out_by_hand():
    # s = sqrt(2 * 0.5) = 1 inside the range; sqrt(2 * 1.125) = 1.5 clipped at 1.3 for A = 2, not for A = -2
    inside, _ = one_row([2.0, 0.5], [2.0, 2.0], gspo)
    assert inside.losses_BT[0].tolist() == pytest.approx([-2.0, -2.0])
    above, grad_T = one_row([2.0, 1.125], [2.0, 2.0], gspo)
    assert above.losses_BT[0].tolist() == pytest.approx([-2.6, -2.6])
    assert above.clipped_BT.all()
    assert grad_T.tolist() == [0, 0]
    negative, _ = one_row([2.0, 1.125], [-2.0, -2.0], gspo)
    assert negative.losses_BT[0].tolist() == pytest.approx([3.0, 3.0])
    assert not negative.clipped_BT.any()


def test_the_mean_of_gspo_token_losses_has_the_gradient_of_the_sequence_ratio():
    torch.manual_seed(0)
    log_probs_BT = (torch.randn(3, 5, dtype=torch.float64) * 0.05).requires_grad_()
    old_BT, mask_BT = torch.zeros(3, 5, dtype=torch.float64), torch.arange(5) < torch.tensor([[5], [3], [1]])
    advantages_B1 = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    losses_BT = gspo(log_probs_BT, old_BT, advantages_B1.expand(3, 5), mask_BT, **CLIP).losses_BT
    (losses_BT.sum(1) / mask_BT.sum(1)).sum().backward()
    ours_BT, log_probs_BT.grad = log_probs_BT.grad, None
    sequence_ratio_B = ((log_probs_BT * mask_BT).sum(1) / mask_BT.sum(1)).exp()
    (-advantages_B1[:, 0] * sequence_ratio_B).sum().backward()
    torch.testing.assert_close(ours_BT, log_probs_BT.grad)


def test_gspo_on_sequences_of_one_token_is_vanilla_without_dual_clip():
    torch.manual_seed(1)
    log_probs_BT, old_BT, advantages_BT = torch.randn(3, 50, 1, dtype=torch.float64)
    mask_BT = torch.ones(50, 1)
    single, token = (
        fn(log_probs_BT, old_BT, advantages_BT, mask_BT, **{**CLIP, "clip_c": 1e9}) for fn in (gspo, vanilla)
    )
    torch.testing.assert_close(single.losses_BT, token.losses_BT)
    assert torch.equal(single.clipped_BT, token.clipped_BT)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_nothing_off_the_mask_reaches_losses_flags_or_gradients(name):
    torch.manual_seed(2)
    values = torch.randn(3, 4, 6)
    mask_BT = torch.arange(6) < torch.tensor([[6], [4], [1], [0]])
    values[:, ~mask_BT] = float("nan")
    values[0, 3, 0] = float("inf")
    log_probs_BT = values[0].requires_grad_()
    result = get_policy_loss(name)(log_probs_BT, values[1], values[2], mask_BT.long(), **CLIP, **SETTINGS.get(name, {}))
    result.losses_BT.sum().backward()
    assert torch.isfinite(log_probs_BT.grad).all()
    for column_BT in (*result, log_probs_BT.grad):
        assert column_BT[~mask_BT].abs().max() == 0 if column_BT.is_floating_point() else not column_BT[~mask_BT].any()


def test_a_huge_ratio_stays_finite():
    log_probs_BT = torch.tensor([[300.0, -300.0]], requires_grad=True)
    result = vanilla(log_probs_BT, torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2), **CLIP)
    result.losses_BT.sum().backward()
    assert result.losses_BT.tolist() == [[3.0, pytest.approx(0.8)]]
    assert result.approx_kl_BT.tolist() == [[-20, 20]]
    assert torch.isfinite(log_probs_BT.grad).all()


def test_refusals_name_the_value():
    ones_BT = torch.ones(2, 3)
    with pytest.raises(ConfigError, match="clip_ratio_c=1.0 must be above 1"):
        vanilla(ones_BT, ones_BT, ones_BT, ones_BT, clip_low=0.2, clip_high=0.2, clip_c=1.0)
    with pytest.raises(DataError, match=r"advantages \(2, 1\)"):
        vanilla(ones_BT, ones_BT, ones_BT[:, :1], ones_BT, **CLIP)
    with pytest.raises(
        ConfigError,
        match=r"loss_mode='vanila'.*'vanilla'\? Known: bypass_mode, cispo, ",
    ):
        get_policy_loss("vanila")
    with pytest.raises(ConfigError, match="taken"):
        register_policy_loss("gspo")(vanilla)
