"""The loss of bypass mode: PPO or REINFORCE against the policy that sampled, with weights and rejections."""

import math

import pytest
import torch

from hybridrl.algos import Rejection
from hybridrl.algos.policy_losses import get_policy_loss, vanilla

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}
F64 = torch.float64
bypass_mode = get_policy_loss("bypass_mode")


def one_row(ratios, advantages, **settings):
    log_probs_BT = (torch.tensor([ratios], dtype=F64).log() - 1).requires_grad_()
    advantages_BT = torch.tensor([advantages], dtype=F64)
    minus_one_BT, mask_BT = torch.full_like(advantages_BT, -1.0), torch.ones_like(advantages_BT)
    result = bypass_mode(log_probs_BT, minus_one_BT, advantages_BT, mask_BT, **CLIP, **settings)
    result.losses_BT.sum().backward()
    return result, log_probs_BT.grad[0].tolist()


def test_ppo_clip_is_the_vanilla_loss_with_the_rollouts_log_probs():
    torch.manual_seed(0)
    new_BT, rollout_BT, advantages_BT = torch.randn(3, 4, 5, dtype=F64)
    mask_BT = torch.rand(4, 5) < 0.8
    ours, theirs = (fn(new_BT, rollout_BT, advantages_BT, mask_BT, **CLIP) for fn in (bypass_mode, vanilla))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_reinforce_weighs_tokens_or_sequences_without_a_gradient_through_the_weight():
    # d(-w A logp) / dlogp = -w A
    assert one_row([2.0, 0.5], [1.0, -2.0], loss_type="reinforce")[1] == pytest.approx([-1.0, 2.0])
    settings = {"loss_type": "reinforce", "rollout_is": "token", "is_threshold": 1.5}
    result, gradient = one_row([2.0, 0.5], [1.0, -2.0], **settings)
    assert gradient == pytest.approx([-1.5, 1.0])
    assert result.clipped_BT.tolist() == [[True, False]]
    assert one_row([2.0, 0.25], [1.0, -2.0], **settings | {"rollout_is": "sequence"})[1] == pytest.approx([-0.5, 1.0])
    assert one_row([2.0, 0.25], [1.0, -2.0], **settings | {"is_lower": 0.5})[1] == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_rejected_tokens_have_no_loss_and_no_gradient(loss_type):
    result, gradient = one_row([1.0, 2.0], [1.0, 1.0], loss_type=loss_type, rejections=[Rejection("token_k1", 1.5)])
    assert gradient == [pytest.approx(-1.0), 0.0]
    assert result.rejected_BT.tolist() == [[False, True]] and result.losses_BT[0, 1] == 0
    result, gradient = one_row([1.0, 2.0], [1.0, 1.0], loss_type=loss_type, rejections=[Rejection("seq_max_k3", 0.1)])
    assert gradient == [0.0, 0.0] and result.rejected_BT.all()


def test_on_policy_both_types_have_the_gradient_of_reinforce():
    settings = {"rollout_is": "sequence", "rejections": [Rejection("seq_mean_k3", 0.01)]}
    for loss_type in ("ppo_clip", "reinforce"):
        gradient = one_row([1.0, 1.0, 1.0], [0.5, -1.5, 2.0], loss_type=loss_type, **settings)[1]
        assert gradient == pytest.approx([-0.5, 1.5, -2.0])


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="loss_type='ppo' is not known; known are ppo_clip, reinforce"):
        one_row([1.0], [1.0], loss_type="ppo")
    assert math.isfinite(one_row([1.0], [1.0])[1][0])
