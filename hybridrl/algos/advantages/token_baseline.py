"""The optimal token baseline: a baseline for each token position of a group of responses.

Shape letters and conventions as in `estimator.py`; G groups, b rows of one part.
"""

from typing import NamedTuple

import torch

from hybridrl.algos.advantages.discounting import TokenOrder
from hybridrl.algos.advantages.estimator import register_adv_est
from hybridrl.algos.advantages.temporal import reward_to_go
from hybridrl.algos.masked import row_parts

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
    ids_G, index_B = torch.unique(group_B, return_inverse=True)
    sums = _GroupSums(*returns_BT.new_zeros(3, len(ids_G), returns_BT.shape[1]))
    for part in row_parts(returns_BT):
        is_bT = None if is_weights_BT is None else is_weights_BT[part]
        weights_bT = _cumulative_weights(mask_BT[part], old_log_probs_BT[part], sum_pi_squared_BT[part], is_bT)
        sums.add(index_B[part], returns_BT[part], weights_bT, mask_BT[part])
    baseline_GT, advantages_BT = sums.baseline(), torch.empty_like(returns_BT)
    for part in row_parts(returns_BT):
        advantages_BT[part] = torch.where(mask_BT[part], returns_BT[part] - baseline_GT[index_B[part]], 0)
    return advantages_BT, returns_BT


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
    advantages_BT, returns_BT = optimal_token_baseline(response_mask_BT=mask_BT, group_B=group_B, **closed)
    return order.restore(advantages_BT), order.restore(returns_BT)


def _cumulative_weights(
    mask_bT: torch.Tensor, log_probs_bT: torch.Tensor, sum_pi_squared_bT: torch.Tensor, is_bT: torch.Tensor | None
) -> torch.Tensor:
    norms_bT = (1 - 2 * log_probs_bT.exp() + sum_pi_squared_bT).clamp(min=0)  # rounding may leave -1e-7
    if is_bT is not None:
        norms_bT = norms_bT * is_bT**2
    return torch.where(mask_bT, norms_bT, 0).cumsum(1)


class _GroupSums(NamedTuple):
    """Sums over the rows of each group, (G, T): of G W, of W, and of rows."""

    weighted_GT: torch.Tensor
    weights_GT: torch.Tensor
    count_GT: torch.Tensor

    def add(
        self, index_b: torch.Tensor, returns_bT: torch.Tensor, weights_bT: torch.Tensor, mask_bT: torch.Tensor
    ) -> None:
        weights_bT = torch.where(mask_bT, weights_bT, 0)
        self.weighted_GT.index_add_(0, index_b, returns_bT * weights_bT)
        self.weights_GT.index_add_(0, index_b, weights_bT)
        self.count_GT.index_add_(0, index_b, mask_bT.to(returns_bT.dtype))

    def baseline(self) -> torch.Tensor:
        """Return b of each group and position, (G, T)."""
        return torch.where(self.count_GT > 1, self.weighted_GT / (self.weights_GT + WEIGHT_EPS), 0)
