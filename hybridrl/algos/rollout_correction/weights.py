"""Importance weights of tokens that another policy sampled: truncated, two-sided, normalised, and their statistics.

Shape letters: B rows, T response tokens. Log-probs are float32; a mask is non-zero on counted tokens. Nothing here has
a gradient. A row without a token on the mask is no sequence and enters no statistic.
"""

import math

import torch

from hybridrl.algos.masked import masked_mean
from hybridrl.algos.rollout_correction.mismatch import MAX_LOG_RATIO, effective_sample_share, log_ratio

LEVELS = ("token", "sequence")
MIN_MEAN_WEIGHT = 1e-8
"""Below it, weights are not divided by their mean; verl's value."""


def rollout_is_weights(
    old_log_probs_BT: torch.Tensor,
    rollout_log_probs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    level: str,
    threshold: float,
    lower: float | None = None,
) -> torch.Tensor:
    """Return importance weights (B, T) float32, 0 off the mask.

        r_t = exp(l_t)                        level = token,       l_t = log pi_old(t) - log pi_rollout(t)
        r_t = exp(sum_t l_t)                  level = sequence, the same for all tokens of a row

        w_t = min(r_t, threshold)             without `lower`: truncated importance sampling (TIS)
        w_t = r_t if lower <= r_t <= threshold else 0                                       (IcePop)

    pi_old is the policy that is about to be trained, pi_rollout the one that generated the sample. A policy-gradient
    term times w is the gradient under pi_old, with lower variance and a bias by the truncation (Ionides 2008, J.
    Comput. Graph. Stat. 17; two-sided: arXiv:2510.18855). A token of weight 0 stays on the mask: it counts in the
    normaliser of the loss. The token's l, or the sequence's sum, is limited to +-20 before exp. Not normalised over the
    batch.

    Raises:
        ValueError: The level is unknown, or a bound is not above 0, or the bounds are in the wrong order.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is not known; known are {', '.join(LEVELS)}")
    if threshold <= 0:
        raise ValueError(f"threshold={threshold} must be above 0")
    if lower is not None and not 0 < lower <= threshold:
        raise ValueError(f"lower={lower} must be above 0 and at most threshold={threshold}")
    ratio_BT = importance_ratios(old_log_probs_BT, rollout_log_probs_BT, mask_BT, level=level)
    if lower is None:
        return ratio_BT.clamp(max=threshold)
    inside_BT = (ratio_BT >= lower) & (ratio_BT <= threshold)
    return torch.where(inside_BT, ratio_BT, torch.zeros_like(ratio_BT))


def importance_ratios(
    old_log_probs_BT: torch.Tensor, rollout_log_probs_BT: torch.Tensor, mask_BT: torch.Tensor, *, level: str
) -> torch.Tensor:
    """Return the ratios r of `rollout_is_weights` (B, T) before any threshold, 0 off the mask."""
    log_ratio_BT = log_ratio(old_log_probs_BT, rollout_log_probs_BT, mask_BT)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(mask_BT.bool(), ratio_BT, torch.zeros_like(ratio_BT))


def normalize_weights(
    weights_BT: torch.Tensor, mask_BT: torch.Tensor, *, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights divided by their mean, w / mean(w), and the mean.

    So the batch keeps its step size.

    The mean is over tokens, and with level = sequence over rows, of the given batch. A mean of at most 1e-8 divides
    nothing, and 1 is returned in its place. Apply it after the threshold.
    """
    weights_N = _row_means(weights_BT, mask_BT) if level == "sequence" else weights_BT[mask_BT.bool()].double()
    mean = weights_N.mean()
    mean = torch.where(mean > MIN_MEAN_WEIGHT, mean, torch.ones_like(mean))
    return (weights_BT / mean).to(weights_BT.dtype), mean


def weight_stats(
    weights_BT: torch.Tensor,
    ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    level: str,
    threshold: float,
    lower: float | None = None,
) -> dict[str, float]:
    """Return statistics of the weights, under verl's names; empty if the mask is.

    rollout_is_mean, std, min, max, eff_sample_size: of the weights over tokens, after the threshold. raw_min, raw_max:
    of the ratios before it, so that raw_max says how far off the samples were (verl's `max` at level sequence).
    ratio_fraction_high, low: share of ratios (of tokens, or of rows) outside [lower, threshold], where lower is
    1 / threshold if there is none. oob_ratio: share of tokens that `lower` and `threshold` set to 0. seq_*: of the
    rows' mean weights, and seq_fraction_high, low of the rows' mean ratios.

    Args:
        weights_BT: Of `rollout_is_weights`, not normalised.
        ratio_BT: Of `importance_ratios`.
    """
    on_BT = mask_BT.bool()
    if not on_BT.any():
        return {}
    low = 1 / threshold if lower is None else lower
    weights_N, ratio_N = weights_BT[on_BT].double(), ratio_BT[on_BT].double()
    counted_N = _row_means(ratio_BT, mask_BT) if level == "sequence" else ratio_N
    stats = {
        "mean": weights_N.mean(),
        "std": weights_N.std(correction=0),
        "min": weights_N.min(),
        "max": weights_N.max(),
        "raw_min": ratio_N.min(),
        "raw_max": ratio_N.max(),
        "eff_sample_size": effective_sample_share(weights_BT.double(), mask_BT),
        "ratio_fraction_high": _share(counted_N > threshold),
        "ratio_fraction_low": _share(counted_N < low),
    }
    if lower is not None:
        stats["oob_ratio"] = _share((ratio_N < lower) | (ratio_N > threshold))
    stats |= {f"seq_{name}": value for name, value in _row_stats(_row_means(weights_BT, mask_BT)).items()}
    raw_rows_N = _row_means(ratio_BT, mask_BT)
    stats |= {"seq_fraction_high": _share(raw_rows_N > threshold), "seq_fraction_low": _share(raw_rows_N < low)}
    return {f"rollout_is_{name}": float(value) for name, value in stats.items()}


def _row_stats(means_N: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "mean": means_N.mean(),
        "std": means_N.std() if len(means_N) > 1 else means_N.new_zeros(()),
        "max": means_N.max(),
        "min": means_N.min(),
        "max_deviation": (means_N - 1).abs().max(),
    }


def _row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the means of the rows with a token on the mask, float64.

    Without such a row it is a single nan.
    """
    has_token_B = mask_BT.bool().any(dim=1)
    means_N = masked_mean(values_BT.double(), mask_BT, dim=1)[has_token_B]
    return means_N if len(means_N) else means_N.new_full((1,), math.nan)


def _share(flags: torch.Tensor) -> torch.Tensor:
    return flags.double().mean()
