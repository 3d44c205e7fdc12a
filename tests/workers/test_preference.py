"""Losses of an optimizer step on preferences: pairs in any order, micro-batches, and statistics."""

import math

import pytest
import torch

from hybridrl.config.schema.preference import PreferenceLossConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.losses import GlobalCounts
from hybridrl.workers.preference import preference_loss, reward_loss

COUNTS = GlobalCounts(num_tokens=14.0, num_seqs=4.0)
LENGTHS = torch.tensor([2, 5, 4, 3])


def rows() -> DataProto:
    """Two pairs: rows 0 and 2 are the chosen ones.

    Scores against the reference are 1, 3, 2 and -1.
    """
    tensors = {
        "response_mask": (torch.arange(5) < LENGTHS[:, None]).long(),
        "pair": torch.tensor([4, 4, 9, 9]),
        "preferred": torch.tensor([1, 0, 1, 0]),
        "ref_sequence_log_probs": torch.tensor([-3.0, -8.0, -6.0, -2.0]),
        "kto_baseline": torch.full((4,), 0.5),
    }
    return DataProto.from_dict(tensors=tensors)


def log_probs() -> torch.Tensor:
    """Sums on the mask: -2, -5, -4, -3. Off the mask there is 0, as from an engine."""
    return (-(torch.arange(5) < LENGTHS[:, None]).float()).requires_grad_()


def outcome(loss_type: str, parts: list[list[int]], **settings):
    """Return loss, statistics and gradient, with the rows of `parts` as micro-batches."""
    loss = preference_loss(PreferenceLossConfig(loss_type=loss_type, **settings))(COUNTS)
    outputs_BT, total, stats = log_probs(), 0.0, {}
    for part in parts:
        value, more = loss({"log_probs": outputs_BT[part]}, rows().select_idxs(part))
        total = total + value
        stats = {name: stats.get(name, 0.0) + float(number.detach()) for name, number in more.items()}
    total.backward()
    return total.item(), stats, outputs_BT.grad


def test_dpo_is_the_mean_over_pairs():
    loss, stats, _ = outcome("dpo", [[0, 1, 2, 3]], beta=0.5)
    # margins: 0.5 (1 - 3) = -1, 0.5 (2 + 1) = 1.5
    expected = (math.log(1 + math.exp(1.0)) + math.log(1 + math.exp(-1.5))) / 2
    assert loss == pytest.approx(expected) == pytest.approx(stats["loss"])
    assert stats == pytest.approx(
        {
            "loss": expected,
            "rewards/chosen": 0.75,
            "rewards/rejected": 0.5,
            "rewards/margins": 0.25,
            "rewards/accuracies": 0.5,
            "logps/chosen": -3.0,
            "logps/rejected": -4.0,
        }
    )


def test_ipo_divides_both_log_probs_by_the_length():
    # scores / lengths: 1/2, 3/5, 2/4, -1/3; target 1 / (2 * 0.5) = 1
    loss, _, _ = outcome("ipo", [[0, 1, 2, 3]], beta=0.5)
    assert loss == pytest.approx(((0.5 - 0.6 - 1) ** 2 + (0.5 + 1 / 3 - 1) ** 2) / 2)


def test_losses_without_a_reference_see_mean_log_probs_alone():
    # every token has log-prob -1: equal scores of -1
    loss, stats, _ = outcome("simpo", [[0, 1, 2, 3]], beta=2.0, simpo_gamma=0.0)
    assert loss == pytest.approx(math.log(2)) and stats["rewards/chosen"] == pytest.approx(-2.0)
    loss, _, _ = outcome("orpo", [[0, 1, 2, 3]], beta=0.1)
    assert loss == pytest.approx(1.0 + 0.1 * math.log(2))


def test_kto_is_the_mean_over_responses():
    loss, stats, _ = outcome("kto", [[0, 1, 2, 3]], beta=1.0)
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = (1 - sigma(0.5)) + (1 - sigma(-2.5)) + (1 - sigma(1.5)) + (1 - sigma(1.5))
    assert loss == pytest.approx(expected / 4)
    # sums over one kind, divided by all four responses
    assert stats["rewards/chosen"] == pytest.approx(3 / 4) and stats["rewards/rejected"] == pytest.approx(2 / 4)


@pytest.mark.parametrize("loss_type", ["dpo", "ipo", "orpo", "simpo", "kto"])
@pytest.mark.parametrize("parts", [[[3, 1, 0, 2]], [[2, 3], [1, 0]], [[], [0, 1, 2, 3]]])
def test_neither_order_nor_micro_batches_change_loss_statistics_and_gradient(loss_type, parts):
    whole, stats, gradient_BT = outcome(loss_type, [[0, 1, 2, 3]])
    other, other_stats, other_gradient_BT = outcome(loss_type, parts)
    assert other == pytest.approx(whole, abs=1e-7) and other_stats == pytest.approx(stats, abs=1e-7)
    torch.testing.assert_close(other_gradient_BT, gradient_BT, rtol=0, atol=1e-7)
    assert gradient_BT.abs().sum() > 0


def test_a_reward_model_is_compared_pair_by_pair_with_margins():
    scores_B = torch.tensor([1.0, 3.0, 2.0, -1.0])
    loss, stats = reward_loss(COUNTS)({"scores": scores_B[[2, 1, 3, 0]]}, rows().select_idxs([2, 1, 3, 0]))
    assert loss.item() == pytest.approx((math.log(1 + math.exp(2.0)) + math.log(1 + math.exp(-3.0))) / 2)
    assert float(stats["rewards/accuracies"]) == 0.5 and float(stats["rewards/margins"]) == pytest.approx(0.5)
    with_margin = rows()
    with_margin.batch["margin"] = torch.tensor([-2.0, -2.0, 3.0, 3.0])
    loss, _ = reward_loss(COUNTS)({"scores": scores_B}, with_margin)
    assert loss.item() == pytest.approx(math.log(2))  # both margins are reached exactly
