"""Policy losses that clip the ratio: PPO's surrogate, and its forms over whole sequences, GSPO and GMPO.

Shape letters and results as in `policy_loss.py`.
"""

import torch

from hybridrl.algos.masked import masked_mean
from hybridrl.algos.policy_losses.policy_loss import (
    MAX_LOG_SEQUENCE_RATIO,
    PolicyLoss,
    limited_log_ratio,
    nowhere,
    on_mask,
    register_policy_loss,
)
from hybridrl.algos.row_wise import row_wise
from hybridrl.errors import ConfigError


@register_policy_loss("vanilla")
@row_wise
def vanilla(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """PPO's clipped surrogate, arXiv:1707.06347 equation 7, with dual clip, arXiv:1912.09729.

        r = exp(logp - old)        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        for A < 0: min(L, -A clip_c)

    The log ratio is limited to +-20.

    Raises:
        ConfigError: clip_c is not above 1; it would cut off unclipped ratios.
    """
    if clip_c <= 1:
        raise ConfigError(f"actor_rollout_ref.actor.clip_ratio_c={clip_c} must be above 1")
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    losses_BT, clipped_BT = clipped_surrogate(log_ratio_BT.exp(), advantages_BT, clip_low=clip_low, clip_high=clip_high)
    bound_BT = -advantages_BT * clip_c
    clipped_lower_BT = (advantages_BT < 0) & (losses_BT > bound_BT)
    losses_BT = torch.where(clipped_lower_BT, bound_BT, losses_BT)
    return on_mask(losses_BT, clipped_BT, clipped_lower_BT, log_ratio_BT, response_mask_BT)


@register_policy_loss("gspo")
@row_wise
def gspo(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Group sequence policy optimisation in its token form, arXiv:2507.18071 equations 7 and 14.

        l_t = logp_t - old_t, limited to +-20        s_i = exp(min(mean_t l_t, 10))
        s_it = sg[s_i] exp(logp_t - sg[logp_t])                                                  sg: no gradient
        L = max(-A s_it, -A clip(s_it, 1 - clip_low, 1 + clip_high))

    All tokens of a sequence have the same ratio. Under seq-mean-token-mean their gradients sum to that of s_i. That is
    the paper's objective, and why `OWN_AGG_MODES` sets this mode; other modes weigh sequences by length. Both limits
    stop the gradient where they hold; verl limits the mean only, so losses differ where a token's log ratio is beyond
    20. Clip ranges are those of a whole sequence (the paper's are 3e-4 and 4e-4). There is no dual clip: `clip_c` is
    unused and `clipped_lower_BT` is False.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    log_sequence_ratio_B1 = masked_mean(log_ratio_BT, response_mask_BT, dim=1)[:, None]
    log_sequence_ratio_BT = log_sequence_ratio_B1.detach() + log_ratio_BT - log_ratio_BT.detach()
    ratio_BT = log_sequence_ratio_BT.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    losses_BT, clipped_BT = clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    return on_mask(losses_BT, clipped_BT, nowhere(clipped_BT), log_ratio_BT, response_mask_BT)


@register_policy_loss("geo_mean")
@row_wise
def geo_mean(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Geometric-mean policy optimisation (GMPO), arXiv:2507.20673 equation 5.

        l_t = log r_t, limited to [-clip_low, clip_high] where that lowers A l_t
        L = -mean_t(A) exp(mean_t l_t), the same for all tokens of a row

    The clip range bounds the log ratio (the paper's is 0.4). `OWN_AGG_MODES` sets seq-mean-token-mean, under which the
    rows' losses are averaged over the mini-batch; verl averages over each micro-batch. `clip_c` is unused.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    kept_BT = torch.where(advantages_BT < 0, log_ratio_BT.clamp(min=-clip_low), log_ratio_BT.clamp(max=clip_high))
    ratio_B1 = masked_mean(kept_BT, response_mask_BT, dim=1)[:, None].exp()
    advantage_B1 = masked_mean(advantages_BT, response_mask_BT, dim=1)[:, None]
    losses_BT = (-advantage_B1 * ratio_B1).expand_as(log_ratio_BT)
    clipped_BT = kept_BT != log_ratio_BT
    return on_mask(losses_BT, clipped_BT, nowhere(clipped_BT), log_ratio_BT, response_mask_BT)


def clipped_surrogate(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) and where the second is larger."""
    plain_BT = -advantages_BT * ratio_BT
    limited_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain_BT, limited_BT), limited_BT > plain_BT
