"""Rejection sampling: which rows are kept, and that the gradient is that of supervised fine-tuning on them."""

import pytest
import torch

from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.config.schema.workers import ActorConfig, PolicyLossConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.losses import GlobalCounts, actor_loss
from hybridrl.workers.sft import sft_loss

LENGTHS = torch.tensor([1, 3, 2, 4, 2, 1])
MASK_BT = (torch.arange(4) < LENGTHS[:, None]).long()
GROUP_B = torch.tensor([0, 0, 0, 1, 1, 1])


def advantages(name, scores, valid=None):
    rewards_BT = torch.zeros(6, 4)
    rewards_BT[torch.arange(6), LENGTHS - 1] = torch.tensor(scores)
    valid_B = None if valid is None else torch.tensor(valid)
    advantages_BT, returns_BT = get_adv_estimator(name)(rewards_BT, MASK_BT, group_B=GROUP_B, valid_B=valid_B)
    assert torch.equal(advantages_BT, returns_BT) and (advantages_BT[MASK_BT == 0] == 0).all()
    return advantages_BT


def test_raft_keeps_the_best_of_each_group():
    # 13 tokens, rows 1 and 4 are kept with 3 + 2 tokens: 13 / 5 = 2.6
    found = advantages("raft", [1.0, 2.0, 1.5, -3.0, -1.0, -2.0])
    assert found[:, 0].tolist() == pytest.approx([0, 2.6, 0, 0, 2.6, 0])
    # equal bests are all kept: rows 0 and 1, and all of group 1
    assert (advantages("raft", [1.0, 1.0, 0.0, 0.0, 0.0, 0.0])[:, 0] > 0).tolist() == [True, True, False, *[True] * 3]


def test_star_keeps_the_right_ones_and_nothing_of_a_group_that_failed():
    # rows 1 and 2 are kept with 3 + 2 tokens of 13
    assert advantages("star", [0.0, 1.0, 1.0, 0.0, 0.0, -1.0])[:, 0].tolist() == pytest.approx([0, 2.6, 2.6, 0, 0, 0])
    assert (advantages("star", [0.0] * 6) == 0).all()


@pytest.mark.parametrize("name", ["raft", "star"])
def test_a_row_without_a_reward_is_not_kept_and_does_not_count(name):
    # Row 1, the best, has failed: 10 tokens are left, rows 2 and 4 are kept with 2 + 2 of them.
    found = advantages(name, [0.0, 9.0, 1.0, 0.0, 1.0, 0.0], valid=[True, False, True, True, True, True])
    assert found[:, 0].tolist() == pytest.approx([0, 0, 2.5, 0, 2.5, 0])


@pytest.mark.parametrize("name", ["raft", "star"])
def test_with_gpg_the_gradient_is_that_of_fine_tuning_on_the_kept_rows(name):
    scores = [0.0, 1.0, 0.5, 0.0, 1.0, 0.0]
    kept = {"raft": [1, 4], "star": [1, 2, 4]}[name]
    log_probs_BT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    columns = {"response_mask": MASK_BT, "old_log_probs": log_probs_BT.detach() - 0.3}
    rows = DataProto.from_dict(tensors=columns | {"advantages": advantages(name, scores)})
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gpg"))
    loss, _ = actor_loss(config, GlobalCounts(*GlobalCounts.local(MASK_BT)))({"log_probs": log_probs_BT}, rows)
    [found] = torch.autograd.grad(loss, log_probs_BT)

    counts = GlobalCounts(*GlobalCounts.local(MASK_BT[kept]))
    kept_rows = DataProto.from_dict(tensors={"response_mask": MASK_BT[kept]})
    loss, _ = sft_loss(counts)({"log_probs": log_probs_BT[kept]}, kept_rows)
    [expected] = torch.autograd.grad(loss, log_probs_BT)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
