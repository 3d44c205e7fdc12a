"""Correct for samples of another policy: older weights, or the same weights in another engine.

Shape letters: B rows, T response tokens. Log-probs are float32; a mask is non-zero on counted tokens. Nothing here has
a gradient.
"""

import torch

from hybridrl.algos.masked import masked_mean, masked_sum
from hybridrl.algos.shapes import check_same_shape

LEVELS = ("token", "sequence")
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, as in verl: e^20 is far above any threshold and still a float32."""


def rollout_is_weights(
    old_log_probs_BT: torch.Tensor,
    rollout_log_probs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    level: str,
    threshold: float,
) -> torch.Tensor:
    """Return truncated importance weights (B, T) float32, 0 off the mask.

        token:     w_t = min(exp(log pi_old(t) - log pi_rollout(t)), threshold)
        sequence:  w_t = min(exp(sum_t (log pi_old - log pi_rollout)), threshold), the same for all tokens of a row

    pi_old is the policy that is about to be trained, pi_rollout the one that generated the sample. A policy-gradient
    term times w is the gradient under pi_old, with lower variance and a bias by the truncation (truncated importance
    sampling, Ionides 2008, J. Comput. Graph. Stat. 17). Not normalised over the batch.

    Raises:
        ValueError: The level is unknown, or the threshold is not above 0.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is not known; known are {', '.join(LEVELS)}")
    if threshold <= 0:
        raise ValueError(f"threshold={threshold} must be above 0")
    log_ratio_BT = log_ratio(old_log_probs_BT, rollout_log_probs_BT, mask_BT)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(log_ratio_BT)
    return torch.where(mask_BT.bool(), log_ratio_BT.exp().clamp(max=threshold), torch.zeros_like(log_ratio_BT))


def log_ratio(
    old_log_probs_BT: torch.Tensor, rollout_log_probs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return log pi_old - log pi_rollout (B, T), clamped to +-20, 0 off the mask."""
    check_same_shape(old_log_probs=old_log_probs_BT, rollout_log_probs=rollout_log_probs_BT, mask=mask_BT)
    difference_BT = (old_log_probs_BT - rollout_log_probs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask_BT.bool(), difference_BT, torch.zeros_like(difference_BT))


def effective_sample_share(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return (sum w)^2 / (n sum w^2) over the n tokens on the mask.

    1 if all weights are equal, 1/n if one token has all the weight.
    """
    squared = masked_sum(weights_BT, mask_BT) ** 2
    return squared / (mask_BT.bool().sum() * masked_sum(weights_BT**2, mask_BT)).clamp(min=1e-12)


def correction_stats(weights_BT: torch.Tensor, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """Return monitoring statistics of the weights and the policy mismatch.

    Mean, minimum and maximum weight, effective sample share, and two KL estimates over tokens: kl = mean(log pi_rollout
    - log pi_old), k3 = mean(exp(d) - d - 1) with d = log pi_old - log pi_rollout.
    """
    kept = weights_BT[mask_BT.bool()]
    return {
        "is_mean": float(masked_mean(weights_BT, mask_BT)),
        "is_min": float(kept.min()) if len(kept) else 0.0,
        "is_max": float(kept.max()) if len(kept) else 0.0,
        "is_eff_sample_size": float(effective_sample_share(weights_BT, mask_BT)),
        "kl": float(masked_mean(-log_ratio_BT, mask_BT)),
        "k3_kl": float(masked_mean(log_ratio_BT.exp() - log_ratio_BT - 1, mask_BT)),
    }
