"""Losses of an optimizer step, with numbers worked out by hand."""

import math

import pytest
import torch

from hybridrl.algos.policy_losses import POLICY_LOSSES, PolicyLoss, register_policy_loss
from hybridrl.config.schema.rollout_correction import RolloutCorrectionConfig, correction_plan
from hybridrl.config.schema.workers import ActorConfig, PolicyLossConfig
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.losses import GlobalCounts, OwnLogProbs, actor_loss


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gspo_weighs_answers_alike_whatever_their_length(mode):
    # two answers of 2 and 8 tokens, advantages 1 and -1, ratio 1: each answer's gradients add up to a half, its share
    # of the mean
    mask_BT = (torch.arange(8) < torch.tensor([[2], [8]])).long()
    log_probs_BT = torch.zeros(2, 8, requires_grad=True)
    advantages_BT = torch.tensor([[1.0], [-1.0]]) * mask_BT
    rows = DataProto.from_dict(
        tensors={"response_mask": mask_BT, "old_log_probs": torch.zeros(2, 8), "advantages": advantages_BT}
    )
    config = ActorConfig(loss_agg_mode=mode, policy_loss=PolicyLossConfig(loss_mode="gspo"))
    loss, _ = actor_loss(config, GlobalCounts(num_tokens=10.0, num_seqs=2.0))({"log_probs": log_probs_BT}, rows)
    loss.backward()
    assert log_probs_BT.grad.sum(-1).tolist() == pytest.approx([-0.5, 0.5])


def test_importance_weights_multiply_the_advantages():
    # ratio 1: d loss / d log_prob of a token is -advantage * weight / num_tokens
    mask_BT = torch.tensor([[1, 1, 0]])
    columns = {
        "response_mask": mask_BT,
        "old_log_probs": torch.zeros(1, 3),
        "advantages": torch.tensor([[2.0, -4.0, 0.0]]),
        "rollout_is_weights": torch.tensor([[0.5, 2.0, 0.0]]),
    }
    log_probs_BT = torch.zeros(1, 3, requires_grad=True)
    loss_fn = actor_loss(ActorConfig(), GlobalCounts(num_tokens=2.0, num_seqs=1.0))
    loss, _ = loss_fn({"log_probs": log_probs_BT}, DataProto.from_dict(tensors=columns))
    loss.backward()
    assert log_probs_BT.grad.tolist() == [[-0.5, 4.0, 0.0]]


def test_importance_weights_multiply_the_penalty_of_a_loss_too():
    # dro at log r = 1: -(A logp - 0.5 / 2 * 1) * weight = -(2 * 1 - 0.25) * 0.5
    columns = {
        "response_mask": torch.ones(1, 1),
        "old_log_probs": torch.zeros(1, 1),
        "advantages": torch.full((1, 1), 2.0),
    }
    columns["rollout_is_weights"] = torch.full((1, 1), 0.5)
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=0.5))
    loss_fn = actor_loss(config, GlobalCounts(num_tokens=1.0, num_seqs=1.0))
    loss, _ = loss_fn({"log_probs": torch.ones(1, 1)}, DataProto.from_dict(tensors=columns))
    assert float(loss) == pytest.approx(-0.875)


def test_the_loss_of_bypass_mode_rejects_tokens_and_keeps_them_in_the_divisor():
    # ratios 1 and 2 to the rollout; 2 is rejected: d loss / d log_prob is -advantage / 2 tokens where kept
    log_probs_BT = torch.tensor([[0.0, math.log(2.0)]], requires_grad=True)
    columns = {"response_mask": torch.ones(1, 2), "old_log_probs": torch.zeros(1, 2), "advantages": torch.ones(1, 2)}
    settings = {"bypass_mode": True, "rollout_rs": ["token_k1"], "rollout_rs_threshold": [1.5]}
    correction = correction_plan(RolloutCorrectionConfig(**settings))
    loss_fn = actor_loss(ActorConfig(), GlobalCounts(num_tokens=2.0, num_seqs=1.0), correction=correction)
    loss, stats = loss_fn({"log_probs": log_probs_BT}, DataProto.from_dict(tensors=columns))
    loss.backward()
    assert log_probs_BT.grad.tolist() == [[-0.5, 0.0]]
    assert stats["rollout_corr/rollout_rs_masked_fraction"] == 0.5


def test_a_loss_gets_the_columns_that_its_parameters_name_and_says_which_it_lacks():
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="clip_cov"))
    loss_fn = actor_loss(config, GlobalCounts(num_tokens=2.0, num_seqs=1.0))
    columns = {"response_mask": torch.ones(1, 2), "old_log_probs": torch.zeros(1, 2), "advantages": torch.ones(1, 2)}
    outputs = {"log_probs": torch.zeros(1, 2)}
    with pytest.raises(DataError, match="clip_cov reads .*'cov_selected'.* batch lacks"):
        loss_fn(outputs, DataProto.from_dict(tensors=columns))
    chosen = columns | {"cov_selected": torch.tensor([[True, False]])}
    assert loss_fn(outputs, DataProto.from_dict(tensors=chosen))[0] == -0.5


def test_the_likelihood_of_right_responses_is_added_to_the_loss():
    config, counts = ActorConfig(positive_nll_coef=0.1), GlobalCounts(num_tokens=4.0, num_seqs=2.0)
    columns = {
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "old_log_probs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "nll_weights": torch.tensor([4 / 3, 0.0]),  # four tokens, three of them of the right response
    }
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-9.0, -9.0, -9.0]], requires_grad=True)
    loss, stats = actor_loss(config, counts)({"log_probs": log_probs}, DataProto.from_dict(tensors=columns))
    loss.backward()
    # Advantages of 0 leave the likelihood alone: 0.1 (1 + 2 + 3) / 3, with the gradient of supervised fine-tuning.
    assert loss.item() == pytest.approx(0.2) and stats["actor/positive_nll_loss"].item() == pytest.approx(2.0)
    assert log_probs.grad.tolist() == [pytest.approx([-0.1 / 3] * 3), [0, 0, 0]]


@pytest.mark.parametrize("factor, expected", [(None, -10 / (2 * 3)), (5, -10 / (2 * 5))])
def test_the_divisor_of_dr_grpo_is_the_width_or_the_configured_factor(factor, expected):
    config = ActorConfig(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=factor)
    columns = {
        "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "old_log_probs": torch.zeros(2, 3),
        "advantages": torch.full((2, 3), 2.0),
    }
    loss_fn = actor_loss(config, GlobalCounts(num_tokens=5.0, num_seqs=2.0))
    # The ratio is 1, so each of the five tokens has a loss of -2.
    assert loss_fn({"log_probs": torch.zeros(2, 3)}, DataProto.from_dict(tensors=columns))[0].item() == pytest.approx(
        expected
    )


def test_an_update_of_several_steps_needs_log_probs_from_before_it():
    rows = DataProto.from_dict(tensors={"response_mask": torch.ones(2, 3, dtype=torch.int64)})
    with pytest.raises(DataError, match="has 2 optimizer steps; compute them before"):
        OwnLogProbs(rows, epochs=2)


def test_log_probs_of_the_step_itself_give_the_ratio_one_and_the_gradient_of_the_advantages():
    # two tokens with advantage 3: d loss / d log_prob = -3 / 2 each
    columns = {
        "response_mask": torch.tensor([[1, 1, 0]]),
        "advantages": torch.tensor([[3.0, 3.0, 0.0]]),
        "batch_row": torch.tensor([7]),
    }
    rows = DataProto.from_dict(tensors=columns)
    own = OwnLogProbs(rows, epochs=1)
    outputs = {"log_probs": torch.tensor([[-1.0, -2.0, 0.0]], requires_grad=True), "entropy": torch.ones(1, 3)}
    loss, stats = own.used_by(actor_loss(ActorConfig(), GlobalCounts(2.0, 1.0)))(outputs, rows)
    loss.backward()
    assert outputs["log_probs"].grad.tolist() == [[-1.5, -1.5, 0.0]] and float(stats["actor/ppo_kl"]) == 0
    kept = own.columns()
    assert kept["old_log_probs"].tolist() == [[-1.0, -2.0, 0.0]] and kept["batch_row"].tolist() == [7]


def test_a_loss_without_clip_ranges_gets_none():
    def reinforce(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT):
        never_BT = torch.zeros_like(log_probs_BT, dtype=torch.bool)
        return PolicyLoss(-advantages_BT * log_probs_BT, never_BT, never_BT, 0 * log_probs_BT.detach())

    register_policy_loss("no_range")(reinforce)
    try:
        columns = {
            "response_mask": torch.ones(1, 1),
            "old_log_probs": torch.zeros(1, 1),
            "advantages": torch.ones(1, 1),
        }
        config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="no_range"))
        loss_fn = actor_loss(config, GlobalCounts(num_tokens=1.0, num_seqs=1.0))
        loss, _ = loss_fn({"log_probs": torch.full((1, 1), -2.0)}, DataProto.from_dict(tensors=columns))
        assert float(loss) == 2.0
    finally:
        POLICY_LOSSES.pop("no_range")
