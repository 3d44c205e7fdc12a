"""A formula of one's own that cannot be called is refused when it is registered."""

import pytest
import torch

from hybridrl import register_adv_est, register_policy_loss
from hybridrl.algos import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, check_signature
from hybridrl.errors import ConfigError, DataError

OFFERED = ("clip_low", "clip_high")


def wrong_name(a, b, *, clip_ratio_low):
    raise AssertionError


def too_few(a, *, clip_low):
    raise AssertionError


def test_an_argument_that_nobody_passes_is_named_beside_what_is_offered():
    with pytest.raises(ConfigError, match="my loss needs clip_ratio_low.*clip_high, clip_low"):
        check_signature(wrong_name, what="my loss", positional=("a", "b"), offered=OFFERED)
    with pytest.raises(ConfigError, match="my loss takes 1 .*by position.* a, b"):
        check_signature(too_few, what="my loss", positional=("a", "b"), offered=OFFERED)


@pytest.mark.parametrize("fn", [lambda *all_of_them, **more: 0, lambda a, b, c=1, **more: 0, lambda a, b, clip_low: 0])
def test_what_can_be_called_is_accepted(fn):
    check_signature(fn, what="my loss", positional=("a", "b"), offered=OFFERED)


def test_an_estimator_is_checked_when_it_is_registered_and_its_result_when_it_is_called():
    with pytest.raises(ConfigError, match="'mine' needs groups.*by name it gets .*group_B"):
        register_adv_est("mine")(lambda rewards, mask, *, groups: None)
    register_adv_est("mine")(lambda rewards, mask: (rewards.sum(1), rewards))
    try:
        with pytest.raises(DataError, match=r"'mine'.* shape \(2,\).* \(B, T\)"):
            ADVANTAGE_ESTIMATORS.lookup("mine")(torch.zeros(2, 3), torch.ones(2, 3))
    finally:
        ADVANTAGE_ESTIMATORS.pop("mine")


def test_an_estimator_in_verls_signature_gets_index_and_config_and_the_same_numbers_as_the_built_in_one():
    """verl's GRPO as its users copy it: a dictionary by `index`, settings from `config`."""

    def of_verl(token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs):
        scores, rows_of = token_level_rewards.sum(-1), {}
        for row, group in enumerate(index):
            rows_of.setdefault(group, []).append(row)
        assert config.gamma == 0.5 and config.get("lam") == 0.25 and config.get("unknown", 7) == 7
        for rows in rows_of.values():
            centred = scores[rows] - scores[rows].mean()
            scores[rows] = centred / (scores[rows].std() + epsilon) if config.norm_adv_by_std_in_grpo else centred
        return scores[:, None] * response_mask, scores[:, None] * response_mask

    register_adv_est("of_verl")(of_verl)
    try:
        rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 5.0]]), torch.ones(4, 2)
        estimator, arguments = ADVANTAGE_ESTIMATORS.lookup("of_verl"), {"gamma": 0.5, "lam": 0.25}
        assert estimator.needs_group
        for group in (torch.tensor([0, 0, 1, 1]), torch.tensor([3, 9, 3, 9])):
            found = estimator(rewards, mask, group_B=group, **arguments)
            wanted = ADVANTAGE_ESTIMATORS.lookup("grpo")(rewards, mask, group_B=group, **arguments)
            torch.testing.assert_close(found[0], wanted[0])
        with pytest.raises(DataError, match="'of_verl' compares answers to the same prompt and needs group_B"):
            estimator(rewards, mask, **arguments)
    finally:
        ADVANTAGE_ESTIMATORS.pop("of_verl")


def test_a_policy_loss_in_verls_order_is_refused_with_the_changed_signature():
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
        raise AssertionError

    with pytest.raises(ConfigError, match=r"'swapped' takes \(old_log_prob, log_prob, ...\), as in verl") as refused:
        register_policy_loss("swapped")(mine)
    assert "\n    def mine(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, *, clip" in str(
        refused.value
    )
    assert "swapped" not in POLICY_LOSSES
