"""Policy losses of the form -sg[w] A logp: REINFORCE with a weight that has no gradient.

Shape letters and results as in `policy_loss.py`. sg: no gradient. The losses differ in the weight w, a function of
the ratio r = exp(logp - old). `clipped_BT` marks tokens whose weight is limited or 0.
"""

import torch

from hybridrl.algos.masked import masked_sum
from hybridrl.algos.policy_losses.policy_loss import (
    PolicyLoss,
    limited_log_ratio,
    nowhere,
    on_mask,
    register_policy_loss,
)
from hybridrl.algos.row_wise import row_wise

MAX_DPPO_RATIO = 20.0
"""Largest weight of `dppo_tv` and `dppo_kl`, the constant of arXiv:2602.04879 and of verl's code."""
PROBABILITY_EPS = 1e-6
"""Smallest probability of the sampled token, and of all others, in the binary KL."""


@register_policy_loss("gpg")
@row_wise
def gpg(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Group policy gradient, arXiv:2504.02546: plain REINFORCE.

        L = -A logp

    There is no ratio: the clip ranges are unused, and several optimizer steps per batch are not corrected for.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    nowhere_BT = nowhere(log_ratio_BT)
    return weighted_log_probs(
        log_ratio_BT.new_ones(()), nowhere_BT, log_probs_BT, advantages_BT, log_ratio_BT, response_mask_BT
    )


@register_policy_loss("cispo")
@row_wise
def cispo(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Clipped importance-sampling weights, MiniMax-M1, arXiv:2506.13585 equations 4 and 5.

        L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logp

    Unlike in PPO every token keeps a gradient. The paper sets no lower bound: clip_low=1. `clip_c` is unused.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    ratio_BT = log_ratio_BT.detach().exp()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return weighted_log_probs(
        weight_BT, weight_BT != ratio_BT, log_probs_BT, advantages_BT, log_ratio_BT, response_mask_BT
    )


@register_policy_loss("topr")
@row_wise
def topr(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Tapered off-policy REINFORCE, arXiv:2503.14286, section 3.

        L = -A logp                                    where A >= 0
        L = -sg[min(exp(sum_t log r_t), 1)] A logp     where A < 0, the sum over the sequence

    Good samples of an old policy count fully, bad ones fade with their probability. The clip ranges are unused.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    sequence_B1 = masked_sum(log_ratio_BT.detach(), response_mask_BT, dim=1)[:, None]
    tapered_BT = sequence_B1.clamp(max=0).exp().expand_as(log_ratio_BT)
    negative_BT = advantages_BT < 0
    weight_BT = torch.where(negative_BT, tapered_BT, torch.ones_like(tapered_BT))
    limited_BT = negative_BT & (sequence_B1 > 0)
    return weighted_log_probs(weight_BT, limited_BT, log_probs_BT, advantages_BT, log_ratio_BT, response_mask_BT)


@register_policy_loss("dppo_tv")
@row_wise
def dppo_tv(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Divergence PPO with binary total variation, arXiv:2602.04879.

        L = -sg[min(r, 20) v] A logp        v = 0 where the token has left the trust region in the direction of A:
        A > 0 and p - p_old > clip_high,    or A < 0 and p_old - p > clip_low;    else 1

    The region bounds probabilities, not their ratio, so that rare tokens may move. `clip_c` is unused.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    moved_BT = log_probs_BT.detach().exp() - old_log_probs_BT.exp()
    left_BT = torch.where(advantages_BT > 0, moved_BT > clip_high, moved_BT < -clip_low)
    return _inside_region(left_BT, log_probs_BT, advantages_BT, log_ratio_BT, response_mask_BT)


@register_policy_loss("dppo_kl")
@row_wise
def dppo_kl(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Divergence PPO with binary KL, arXiv:2602.04879.

        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))
        L = -sg[min(r, 20) v] A logp        v = 0 where D > clip_high, A > 0 and p > p_old,
                                            or D > clip_low, A < 0 and p < p_old;    else 1

    `clip_c` is unused.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    p_BT, old_BT = _probabilities(log_probs_BT), _probabilities(old_log_probs_BT)
    divergence_BT = old_BT * (old_BT / p_BT).log() + (1 - old_BT) * ((1 - old_BT) / (1 - p_BT)).log()
    rises_BT = advantages_BT > 0
    left_BT = torch.where(
        rises_BT, (divergence_BT > clip_high) & (p_BT > old_BT), (divergence_BT > clip_low) & (p_BT < old_BT)
    )
    return _inside_region(left_BT, log_probs_BT, advantages_BT, log_ratio_BT, response_mask_BT)


def _probabilities(log_probs_BT: torch.Tensor) -> torch.Tensor:
    return log_probs_BT.detach().exp().clamp(PROBABILITY_EPS, 1 - PROBABILITY_EPS)


def _inside_region(
    left_BT: torch.Tensor,
    log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> PolicyLoss:
    ratio_BT = log_ratio_BT.detach().exp().clamp(max=MAX_DPPO_RATIO)
    weight_BT = torch.where(left_BT, 0, ratio_BT)
    return weighted_log_probs(weight_BT, left_BT, log_probs_BT, advantages_BT, log_ratio_BT, mask_BT)


def weighted_log_probs(
    weight_BT: torch.Tensor,
    limited_BT: torch.Tensor,
    log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> PolicyLoss:
    """Return -weight A logp on the mask, where log-probs off the mask may be anything.

    `weight_BT` may also be one number.
    """
    # Masked before the product: the backward pass multiplies the factor by 0 off the mask, where it may be NaN.
    factor_BT = torch.where(mask_BT.bool(), -(weight_BT * advantages_BT), 0)
    return on_mask(factor_BT * log_probs_BT, limited_BT, nowhere(limited_BT), log_ratio_BT, mask_BT)
