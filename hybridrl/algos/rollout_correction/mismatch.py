"""Distance between the policy that is about to be trained and the one that generated the samples.

Shape letters: B rows, T response tokens, N rows with a token. Computed in float64. Nothing here has a gradient.
"""

import math

import torch

from hybridrl.algos.masked import masked_mean, masked_sum
from hybridrl.algos.shapes import check_same_shape

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, as in verl.

e^20 is far above any threshold and still a float32.
"""

NAMES = (
    *("kl", "k3_kl", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff"),
    *("log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio", "chi2_token", "chi2_seq"),
    "eff_sample_size",
)


def mismatch_stats(
    old_log_probs_BT: torch.Tensor, rollout_log_probs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> dict[str, float]:
    """Return divergences of the two policies under verl's names; all nan if the mask is empty.

        l_t = log pi_old(t) - log pi_rollout(t)

        kl            mean_t(-l)                            chi2_token    mean_t(exp(l)^2) - 1
        k3_kl         mean_t(exp(l) - l - 1)                chi2_seq      mean_i(exp(sum_t l)^2) - 1
        training_ppl  mean_i(exp(-mean_t log pi_old))       log_ppl_diff  mean_i(-mean_t l), also abs, max, min
        rollout_ppl   mean_i(exp(-mean_t log pi_rollout))   ppl_ratio     mean_i(exp(-mean_t l))
        training_log_ppl, rollout_log_ppl: mean_i of the logarithms
        eff_sample_size: (sum r)^2 / (n sum r^2), r = exp(l)

    mean_t is over the tokens on the mask, and over those of a row inside mean_i, which is over rows with a token. kl
    and k3_kl estimate KL(pi_rollout || pi_old). l, and the sum over a row, is limited to +-20 inside exp; verl does not
    limit k3_kl, which then overflows. verl has no `eff_sample_size` of untruncated weights.
    """
    on_BT = mask_BT.bool()
    if not on_BT.any():
        return dict.fromkeys(NAMES, math.nan)
    old_BT, rollout_BT, has_token_B = old_log_probs_BT.double(), rollout_log_probs_BT.double(), on_BT.any(dim=1)
    log_ratio_BT = log_ratio(old_BT, rollout_BT, mask_BT)
    limited_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    old_N, rollout_N, diff_N = (
        -masked_mean(values_BT, mask_BT, dim=1)[has_token_B] for values_BT in (old_BT, rollout_BT, log_ratio_BT)
    )
    sums_N = log_ratio_BT.sum(dim=1)[has_token_B].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    stats = (
        -log_ratio_BT[on_BT].mean(),
        (limited_BT.exp() - log_ratio_BT - 1)[on_BT].mean(),
        *(old_N.exp().mean(), old_N.mean(), rollout_N.exp().mean(), rollout_N.mean()),
        *(diff_N.mean(), diff_N.abs().mean(), diff_N.max(), diff_N.min()),
        diff_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().mean(),
        (limited_BT.exp()[on_BT] ** 2).mean() - 1,
        (sums_N.exp() ** 2).mean() - 1,
        effective_sample_share(limited_BT.exp(), mask_BT),
    )
    return {name: float(value) for name, value in zip(NAMES, stats, strict=True)}


def log_ratio(
    old_log_probs_BT: torch.Tensor, rollout_log_probs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return log pi_old - log pi_rollout (B, T), 0 off the mask. Not clamped."""
    check_same_shape(old_log_probs=old_log_probs_BT, rollout_log_probs=rollout_log_probs_BT, mask=mask_BT)
    difference_BT = (old_log_probs_BT - rollout_log_probs_BT).detach()
    return torch.where(mask_BT.bool(), difference_BT, torch.zeros_like(difference_BT))


def effective_sample_share(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return (sum w)^2 / (n sum w^2) over the n tokens on the mask.

    1 if all weights are equal, 1/n if one token has all the weight.
    """
    squared = masked_sum(weights_BT, mask_BT) ** 2
    return squared / (mask_BT.bool().sum() * masked_sum(weights_BT**2, mask_BT)).clamp(min=1e-30)
