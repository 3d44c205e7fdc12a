"""Estimators over time: generalised advantage estimation, REINFORCE++, ReMax.

Shape letters and conventions as in `estimator.py`; b rows of one part, G_t the discounted sum of rewards from token t.
"""

import torch

from hybridrl.algos.advantages.discounting import TokenOrder, discounted_sum_to_go
from hybridrl.algos.advantages.estimator import register_adv_est
from hybridrl.algos.masked import masked_whiten, row_parts

Both = tuple[torch.Tensor, torch.Tensor]


@register_adv_est("gae", needs_critic=True, masks=True)
def gae(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    values_BT: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Both:
    """Generalised advantage estimation, arXiv:1506.02438, equations 11 and 16.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        returns_t = A_t + V_t

    V is 0 after the last token.

    Returns:
        Advantages whitened over all tokens, as in verl, and returns from the advantages before whitening.
    """
    mask_BT = response_mask_BT.bool()
    advantages_BT, returns_BT = torch.empty_like(values_BT), torch.empty_like(values_BT)
    for part in row_parts(values_BT):
        order = TokenOrder(mask_BT[part])
        deltas_bT, values_bT = _td_errors(order, token_level_rewards_BT[part], values_BT[part], gamma=gamma)
        sums_bT = discounted_sum_to_go(deltas_bT, gamma * lam)
        advantages_BT[part] = order.restore(sums_bT)
        returns_BT[part] = order.restore(sums_bT + values_bT)
    return masked_whiten(advantages_BT, mask_BT), returns_BT


@register_adv_est("vapo", needs_critic=True, masks=True)
def vapo(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    values_BT: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_alpha: float = 0.05,
) -> Both:
    """VAPO's decoupled GAE with a lambda by length, arXiv:2504.05118, sections 4.1 and 4.2.

        A_t = delta_t + gamma lam_i A_{t+1}        lam_i = max(0, 1 - 1 / (lam_alpha l_i))
        returns_t = V_t + B_t                      B_t = delta_t + gamma lam B_{t+1}

    l_i is the number of row i's tokens: the weights of the TD errors sum to lam_alpha l_i, so a long response is not
    estimated from its last tokens' bias alone. The critic learns from `lam`, 1 in the paper. Advantages are whitened as
    in `gae`. Not here: the pre-training of the critic, which is `trainer.critic_warmup`, and the likelihood of right
    responses, which is `actor.positive_nll_coef`.

    Returns:
        Advantages and returns.
    """
    mask_BT = response_mask_BT.bool()
    advantages_BT, returns_BT = torch.empty_like(values_BT), torch.empty_like(values_BT)
    for part in row_parts(values_BT):
        order = TokenOrder(mask_BT[part])
        deltas_bT, values_bT = _td_errors(order, token_level_rewards_BT[part], values_BT[part], gamma=gamma)
        length_b = mask_BT[part].sum(1).clamp(min=1)
        lam_b = (1 - 1 / (lam_alpha * length_b.to(values_BT.dtype))).clamp(min=0)
        advantages_BT[part] = order.restore(discounted_sum_to_go(deltas_bT, gamma * lam_b))
        returns_BT[part] = order.restore(discounted_sum_to_go(deltas_bT, gamma * lam) + values_bT)
    return masked_whiten(advantages_BT, mask_BT), returns_BT


@register_adv_est("reinforce_plus_plus", masks=True)
def reinforce_plus_plus(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, gamma: float = 1.0
) -> Both:
    """REINFORCE++ without critic and groups, arXiv:2501.03262.

        G_t = r_t + gamma G_{t+1}        A = whiten(G) over all tokens of the batch

    Returns:
        Advantages and G.
    """
    returns_BT = reward_to_go(token_level_rewards_BT, response_mask_BT, gamma=gamma)
    return masked_whiten(returns_BT, response_mask_BT), returns_BT


@register_adv_est("remax", needs=("baseline_B",), masks=True)
def remax(token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, baseline_B: torch.Tensor) -> Both:
    """ReMax, arXiv:2310.10505, algorithm 2.

        A_t = sum_{s >= t} r_s - b        b = score of the greedy response to the same prompt

    b does not depend on the sampled response, so the gradient has no bias. With b = 0 it is REINFORCE. b has no KL
    penalty, also where the rewards have one, as in verl.

    Args:
        baseline_B: b of each row's prompt.

    Returns:
        Advantages, not whitened, and the rewards to go.
    """
    returns_BT = reward_to_go(token_level_rewards_BT, response_mask_BT, gamma=1.0)
    baseline_B1 = baseline_B.to(returns_BT.dtype)[:, None]
    return torch.where(response_mask_BT.bool(), returns_BT - baseline_B1, 0), returns_BT


def reward_to_go(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Return G_t = r_t + gamma G_{t+1} over the tokens on the mask, 0 off it."""
    mask_BT, returns_BT = mask_BT.bool(), torch.empty_like(rewards_BT)
    for part in row_parts(rewards_BT):
        order = TokenOrder(mask_BT[part])
        returns_BT[part] = order.restore(discounted_sum_to_go(order.close_gaps(rewards_BT[part]), gamma))
    return returns_BT


def _td_errors(order: TokenOrder, rewards_bT: torch.Tensor, values_bT: torch.Tensor, *, gamma: float) -> Both:
    """Return delta_t = r_t + gamma V_{t+1} - V_t and V_t, both without gaps between tokens."""
    values_bT = order.close_gaps(values_bT)
    deltas_bT = order.close_gaps(rewards_bT) - values_bT
    deltas_bT[:, :-1] += gamma * values_bT[:, 1:]
    return deltas_bT, values_bT
