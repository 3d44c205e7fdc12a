"""Estimators over time: generalised advantage estimation and REINFORCE++.

Shape letters and conventions as in `estimator.py`.
"""

import torch

from hybridrl.algos.advantages.estimator import register_adv_est
from hybridrl.algos.masked import masked_whiten


@register_adv_est("gae", needs_critic=True)
def gae(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    values_BT: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, arXiv:1506.02438, equations 11 and 16.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        returns_t = A_t + V_t

    V is 0 after the last token.

    Returns:
        Advantages whitened over all tokens, as in verl, and returns from the advantages before whitening.
    """
    mask_BT = response_mask_BT.bool()
    deltas_BT = token_level_rewards_BT + gamma * _value_after(values_BT, mask_BT) - values_BT
    advantages_BT = _discounted_sum_to_go(deltas_BT, mask_BT, decay=gamma * lam)
    returns_BT = torch.where(mask_BT, advantages_BT + values_BT, torch.zeros_like(values_BT))
    return masked_whiten(advantages_BT, mask_BT), returns_BT


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, gamma: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ without critic and groups, arXiv:2501.03262.

        G_t = r_t + gamma G_{t+1}        A = whiten(G) over all tokens of the batch

    Returns:
        Advantages and G.
    """
    returns_BT = _discounted_sum_to_go(token_level_rewards_BT, response_mask_BT.bool(), decay=gamma)
    return masked_whiten(returns_BT, response_mask_BT), returns_BT


def _value_after(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return for each token the value at the next token on the mask, 0 where there is none."""
    num_tokens = values_BT.shape[1]
    here_BT = torch.where(mask_BT, torch.arange(num_tokens, device=values_BT.device), num_tokens)
    at_or_after_BT = here_BT.flip(1).cummin(dim=1).values.flip(1)
    end_B1 = torch.full_like(at_or_after_BT[:, :1], num_tokens)
    values_and_zero = torch.cat([values_BT, torch.zeros_like(values_BT[:, :1])], dim=1)
    return values_and_zero.gather(1, torch.cat([at_or_after_BT[:, 1:], end_B1], dim=1))


def _discounted_sum_to_go(terms_BT: torch.Tensor, mask_BT: torch.Tensor, *, decay: float) -> torch.Tensor:
    """Return S_t = x_t + decay S_{t+1} for t over the tokens on the mask; 0 off it."""
    # Transposed, one token of all rows is contiguous.
    terms_TB, mask_TB = terms_BT.T.contiguous(), mask_BT.T.contiguous()
    sums_TB, sum_B = torch.zeros_like(terms_TB), torch.zeros_like(terms_BT[:, 0])
    for t in reversed(range(len(terms_TB))):
        sum_B = torch.where(mask_TB[t], terms_TB[t] + decay * sum_B, sum_B)
        sums_TB[t] = sum_B
    return torch.where(mask_BT, sums_TB.T, torch.zeros_like(terms_BT))
