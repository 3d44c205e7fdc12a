"""Clip-Cov and KL-Cov: which tokens are selected, and what happens to them."""

import math

import pytest
import torch

from hybridrl.algos.policy_losses import get_policy_loss, vanilla
from hybridrl.algos.policy_losses.covariance import covariances, select_at_random, select_by_rank, token_keys
from hybridrl.errors import ConfigError

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 1e9}
F64 = torch.float64
# log-probs -1, -2, -3 | off, -2: mean -2. Advantages 4, 1, -2 | off, 1: mean 1.
LOGP = torch.tensor([[-1.0, -2.0, -3.0], [math.nan, -2.0, math.nan]])
ADV = torch.tensor([[4.0, 1.0, -2.0], [math.nan, 1.0, math.nan]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 0]])


def random_samples(rows=40, columns=12):
    torch.manual_seed(0)
    old, advantages = torch.randn(2, rows, columns)
    mask = (torch.rand(rows, 1) * columns).ceil() > torch.arange(columns)
    tokens = torch.randint(0, 100, (rows, columns))
    return old - 2, advantages, mask, tokens


def test_a_covariance_is_the_product_of_what_is_left_of_the_means():
    torch.testing.assert_close(covariances(LOGP, ADV, MASK), torch.tensor([[3.0, 0, 3.0], [0, 0, 0]], dtype=F64))


def test_by_rank_the_largest_are_selected_with_all_that_are_equal():
    # one of four tokens: two are equal
    assert select_by_rank(LOGP, ADV, MASK, ratio=0.25).tolist() == [[True, False, True], [False] * 3]
    # all four: a covariance of 0 is not selected
    assert select_by_rank(LOGP, ADV, MASK, ratio=1.0).tolist() == [[True, False, True], [False] * 3]


def test_tokens_of_equal_advantages_are_never_selected():
    assert not select_by_rank(LOGP, torch.ones_like(ADV), MASK, ratio=1.0).any()


def test_at_random_as_many_as_asked_for_are_selected_and_only_within_the_bounds():
    old, advantages, mask, tokens = random_samples()
    keys = token_keys(tokens, mask, num_columns=12, seed=7)
    bounds = {"low": 0.1, "high": 0.8, "keys_BT": keys}
    selected = select_at_random(old, advantages, mask, ratio=0.1, **bounds)
    cov = covariances(old, advantages, mask)
    assert selected.sum() == int(0.1 * mask.sum()) > 5
    assert (cov[selected] > 0.1).all() and (cov[selected] < 0.8).all() and mask[selected].all()
    other = token_keys(tokens, mask, num_columns=12, seed=8)
    assert not torch.equal(select_at_random(old, advantages, mask, ratio=0.1, **bounds | {"keys_BT": other}), selected)


def test_keys_are_uniform():
    keys = token_keys(torch.arange(4000).reshape(400, 10), torch.ones(400, 10), num_columns=10, seed=1).double() / 2**63
    # the mean of 4000 uniform numbers: 0.5 +- 0.0046; of their squares: 1/3 +- 0.0047
    assert abs(keys.mean() - 0.5) < 0.02 and abs((keys**2).mean() - 1 / 3) < 0.02
    assert len(keys.unique()) == 4000


def test_selections_do_not_depend_on_the_order_of_rows_or_on_padding():
    old, advantages, mask, tokens = random_samples()
    order, attention = torch.randperm(len(old)), torch.ones_like(tokens)

    def select(samples, tokens, attention):
        keys = token_keys(tokens, attention, num_columns=samples[0].shape[1], seed=3)
        return (
            select_at_random(*samples, ratio=0.05, low=0.1, high=5.0, keys_BT=keys),
            select_by_rank(*samples, ratio=0.05),
        )

    plain = select((old, advantages, mask), tokens, attention)
    moved = [torch.nn.functional.pad(x[order], (0, 4)) for x in (old, advantages, mask)]
    left = [torch.nn.functional.pad(x[order], (5, 0)) for x in (tokens, attention)]
    for ours, theirs in zip(plain, select(moved, *left), strict=True):
        assert torch.equal(theirs[:, :12], ours[order])


def losses(name, ratios, selected, **settings):
    log_probs_BT = torch.tensor([ratios], dtype=F64).log().requires_grad_()
    advantages_BT, selected_BT = torch.full_like(log_probs_BT, 2.0).detach(), torch.tensor([selected])
    zeros_BT, mask_BT = torch.zeros_like(advantages_BT), torch.ones_like(advantages_BT)
    result = get_policy_loss(name)(
        log_probs_BT, zeros_BT, advantages_BT, mask_BT, **CLIP, cov_selected_BT=selected_BT, **settings
    )
    result.losses_BT.sum().backward()
    return result, log_probs_BT.grad[0].tolist()


def test_clip_cov_takes_the_gradient_of_selected_tokens():
    result, gradient = losses("clip_cov", [1.1, 1.1, 1.5], [False, True, False])
    assert result.losses_BT[0].tolist() == pytest.approx([-2.2, 0.0, -2.6])
    assert gradient == pytest.approx([-2.2, 0.0, 0.0])
    assert result.clipped_BT[0].tolist() == [False, True, True]


def test_kl_cov_pulls_selected_tokens_back():
    result, gradient = losses("kl_cov", [1.1, 1.1, 1.5, 0.5], [False, True, False, True], ppo_kl_coef=0.5)
    penalties = [0, math.log(1.1) / 2, 0, math.log(2) / 2]
    assert result.losses_BT[0].tolist() == pytest.approx(
        [-2 * r + p for r, p in zip([1.1, 1.1, 1.5, 0.5], penalties, strict=True)]
    )
    assert gradient == pytest.approx([-2.2, -2.2 + 0.5, -3.0, -1.0 - 0.5])


def test_without_a_selection_clip_cov_is_ppo_and_kl_cov_is_ppo_without_a_clip():
    torch.manual_seed(1)
    new_BT, old_BT, advantages_BT = torch.randn(3, 4, 5, dtype=F64)
    mask_BT = torch.ones(4, 5)
    samples = (new_BT, old_BT, advantages_BT, mask_BT)
    torch.testing.assert_close(get_policy_loss("clip_cov")(*samples, **CLIP)[0], vanilla(*samples, **CLIP)[0])
    wide = {"clip_low": 1.0, "clip_high": 1e9, "clip_c": 1e9}
    torch.testing.assert_close(get_policy_loss("kl_cov")(*samples, **CLIP)[0], vanilla(*samples, **wide)[0])


def test_no_known_loss_takes_the_name():
    with pytest.raises(ConfigError, match="Known: bypass_mode, cispo, clip_cov"):
        get_policy_loss("cov")
