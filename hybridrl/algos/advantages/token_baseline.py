"""The optimal token baseline: a baseline for each token position of a group of responses.

Shape letters and conventions as in `estimator.py`; G groups.
"""

import torch

from hybridrl.algos.advantages.discounting import TokenOrder
from hybridrl.algos.advantages.estimator import register_adv_est
from hybridrl.algos.advantages.temporal import reward_to_go

WEIGHT_EPS = 1e-8
"""Added to a sum of weights, as in verl.

So the baseline is 0 where the policy is certain of every token.
"""
NEEDS = ("old_log_probs_BT", "sum_pi_squared_BT")


@register_adv_est("optimal_token_baseline", needs_group=True, needs=NEEDS, masks=True)
def optimal_token_baseline(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    group_B: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    sum_pi_squared_BT: torch.Tensor,
    is_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards to go minus the variance-optimal baseline of each token position, verl's optimal_token_baseline.

        A_t = G_t - b_gt        b_gt = (sum_i G_it W_it) / (sum_i W_it)     over rows i of g with a token at position t
        W_t = sum_{s <= t} w_s^2 (1 - 2 pi_s + sum_v pi_sv^2)

    G_t is the sum of the rewards from token t. The bracket is the squared norm of the score function of token s in the
    logits, |onehot - pi_s|^2, so W_t stands for that of the tokens so far: the weight of a row in the baseline with the
    least variance (Greensmith et al. 2004, J. Mach. Learn. Res. 5, section 4). w_s is the importance weight of the
    rollout correction, 1 without it.

    Where one row alone has a token, its own reward would be its baseline; b is 0 there, as in verl by default
    (`handle_zero_tail`), and in a group of one.

    Args:
        old_log_probs_BT: log pi of the tokens.
        sum_pi_squared_BT: sum_v pi_v^2 of the policy at each token.

    Returns:
        Advantages, not whitened, and G.
    """
    returns_BT = reward_to_go(token_level_rewards_BT, response_mask_BT, gamma=1.0)
    mask_BT = response_mask_BT.bool()
    weights_BT = _cumulative_weights(mask_BT, old_log_probs_BT, sum_pi_squared_BT, is_weights_BT)
    baseline_BT = _baseline(returns_BT, weights_BT, mask_BT, group_B)
    return torch.where(mask_BT, returns_BT - baseline_BT, 0), returns_BT


@register_adv_est("tir_optimal_token_baseline", needs_group=True, needs=NEEDS, masks=True)
def tir_optimal_token_baseline(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    group_B: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    sum_pi_squared_BT: torch.Tensor,
    is_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with positions that count tokens on the mask, for responses with turns of an environment.

    Without such turns it is `optimal_token_baseline`. "tir" is tool-integrated reasoning.
    """
    order = TokenOrder(response_mask_BT.bool())
    closed = {
        "token_level_rewards_BT": token_level_rewards_BT,
        "old_log_probs_BT": old_log_probs_BT,
        "sum_pi_squared_BT": sum_pi_squared_BT,
        "is_weights_BT": is_weights_BT,
    }
    closed = {name: None if column is None else order.close_gaps(column) for name, column in closed.items()}
    mask_BT = order.close_gaps(torch.ones_like(token_level_rewards_BT)) > 0
    advantages_BT, returns_BT = optimal_token_baseline(
        response_mask_BT=mask_BT,
        group_B=group_B,
        **closed,
    )
    return order.restore(advantages_BT), order.restore(returns_BT)


def _cumulative_weights(
    mask_BT: torch.Tensor, log_probs_BT: torch.Tensor, sum_pi_squared_BT: torch.Tensor, is_BT: torch.Tensor | None
) -> torch.Tensor:
    norms_BT = (1 - 2 * log_probs_BT.exp() + sum_pi_squared_BT).clamp(min=0)  # rounding may leave -1e-7
    if is_BT is not None:
        norms_BT = norms_BT * is_BT**2
    return torch.where(mask_BT, norms_BT, 0).cumsum(1)


def _baseline(
    returns_BT: torch.Tensor, weights_BT: torch.Tensor, mask_BT: torch.Tensor, group_B: torch.Tensor
) -> torch.Tensor:
    """Return each row's baseline (B, T): that of its group at each position."""
    ids_G, index_B = torch.unique(group_B, return_inverse=True)

    def per_group(terms_BT: torch.Tensor) -> torch.Tensor:
        sums_GT = terms_BT.new_zeros(len(ids_G), terms_BT.shape[1])
        return sums_GT.index_add_(0, index_B, terms_BT)

    weights_BT = torch.where(mask_BT, weights_BT, 0)
    baseline_GT = per_group(returns_BT * weights_BT) / (per_group(weights_BT) + WEIGHT_EPS)
    count_GT = per_group(mask_BT.to(returns_BT.dtype))
    return torch.where(count_GT > 1, baseline_GT, 0)[index_B]
