"""Rejection: leave tokens or sequences out of the loss.

These are too far from the policy that is trained.

Shape letters: B rows, T response tokens, N rows with a token. Nothing here has a gradient. Weights (`weights.py`)
correct a sample; a rejection removes it. Both may be used together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from hybridrl.algos.masked import masked_mean, masked_sum
from hybridrl.algos.rollout_correction.mismatch import MAX_LOG_RATIO, log_ratio


class Rejection(NamedTuple):
    """A bound on a divergence.

    Attributes:
        kind: A key of `DIVERGENCES`.
        upper: Largest value that is kept; for kinds of k1, of its exponential.
        lower: Smallest exponential that is kept, for kinds of k1 only; None is 1 / upper.
    """

    kind: str
    upper: float
    lower: float | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest divergence that is kept. k2 and k3 are never negative."""
        if not self.kind.endswith("k1"):
            return 0.0, self.upper
        return math.log(1 / self.upper if self.lower is None else self.lower), math.log(self.upper)


def _k1(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    return -log_ratio_BT


def _k2(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    return log_ratio_BT**2 / 2


def _k3(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    return log_ratio_BT.exp() - 1 - log_ratio_BT


def _sum(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return masked_sum(values_BT, mask_BT, dim=1)[:, None]


def _mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return masked_mean(values_BT, mask_BT, dim=1)[:, None]


def _max(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each row; k2 and k3 are at least 0, which padding is here."""
    return torch.where(mask_BT.bool(), values_BT, torch.zeros_like(values_BT)).amax(dim=1, keepdim=True)


Estimator = Callable[[torch.Tensor], torch.Tensor]
Reduction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DIVERGENCES: Mapping[str, tuple[Estimator, Reduction | None]] = {
    "token_k1": (_k1, None),
    "token_k2": (_k2, None),
    "token_k3": (_k3, None),
    "seq_sum_k1": (_k1, _sum),
    "seq_sum_k2": (_k2, _sum),
    "seq_sum_k3": (_k3, _sum),
    "seq_mean_k1": (_k1, _mean),
    "seq_mean_k2": (_k2, _mean),
    "seq_mean_k3": (_k3, _mean),
    "seq_max_k2": (_k2, _max),
    "seq_max_k3": (_k3, _max),
}
"""Kind -> estimate of a token's divergence, and how a row's tokens become one number.

With None each token has its own number.
"""


def rejection_mask(
    old_log_probs_BT: torch.Tensor,
    rollout_log_probs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    rejections: Sequence[Rejection],
) -> torch.Tensor:
    """Return the tokens (B, T) bool of the mask that every rejection keeps.

        l = log pi_old - log pi_rollout, limited to +-20
        k1 = -l        k2 = l^2 / 2        k3 = exp(l) - 1 - l              arXiv:2512.23075; estimators: Schulman 2020

        token_k2, token_k3:     kept if k <= upper
        token_k1:               kept if lower <= exp(k1) <= upper
        seq_sum, seq_mean, seq_max: the same for the sum, mean or maximum over the tokens of a row, for the whole row

    exp(k1) is pi_rollout / pi_old, the inverse of the ratio that weighs a sample, as in verl. For bounds with
    lower * upper = 1 this makes no difference. exp of -seq_mean_k1 is the geometric mean of the ratios of a sequence.
    Rows are not removed.

    Raises:
        ValueError: A kind is unknown.
    """
    kept_BT = mask_BT.bool()
    for rejection in rejections:
        low, high = rejection.limits
        divergence = divergences(old_log_probs_BT, rollout_log_probs_BT, mask_BT, kind=rejection.kind)
        kept_BT = kept_BT & (divergence >= low) & (divergence <= high)
    return kept_BT


def divergences(
    old_log_probs_BT: torch.Tensor, rollout_log_probs_BT: torch.Tensor, mask_BT: torch.Tensor, *, kind: str
) -> torch.Tensor:
    """Return the divergence of each token (B, T), 0 off the mask, or of each row (B, 1)."""
    if kind not in DIVERGENCES:
        raise ValueError(f"kind={kind!r} is not known; known are {', '.join(DIVERGENCES)}")
    estimate, reduce = DIVERGENCES[kind]
    log_ratio_BT = log_ratio(old_log_probs_BT, rollout_log_probs_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values_BT = estimate(log_ratio_BT)
    return values_BT if reduce is None else reduce(values_BT, mask_BT)


def rejection_stats(
    old_log_probs_BT: torch.Tensor,
    rollout_log_probs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    rejections: Sequence[Rejection],
) -> dict[str, float]:
    """Return statistics of the divergences and of what is rejected, under verl's names; empty if the mask is.

    rollout_rs_masked_fraction: share of the tokens that are rejected. rollout_rs_seq_masked_fraction: share of the rows
    with a rejected token. rollout_rs_{kind}_*: the same for one kind, and mean, std, min, max, seq_* of its divergence
    and shares outside its bounds. std is over tokens, with values limited to the bounds.
    """
    if not mask_BT.bool().any():
        return {}
    samples = (old_log_probs_BT, rollout_log_probs_BT, mask_BT)
    stats = _masked_fractions(rejection_mask(*samples, rejections), mask_BT)
    for rejection in rejections:
        own = _divergence_stats(divergences(*samples, kind=rejection.kind), mask_BT, *rejection.limits)
        own |= _masked_fractions(rejection_mask(*samples, [rejection]), mask_BT)
        stats |= {f"{rejection.kind}_{name}": value for name, value in own.items()}
    return {f"rollout_rs_{name}": float(value) for name, value in stats.items()}


def _masked_fractions(kept_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    rejected_BT, has_token_B = mask_BT.bool() & ~kept_BT, mask_BT.bool().any(dim=1)
    return {
        "masked_fraction": rejected_BT.sum().double() / mask_BT.bool().sum(),
        "seq_masked_fraction": rejected_BT.any(dim=1)[has_token_B].double().mean(),
    }


def _divergence_stats(
    divergence: torch.Tensor, mask_BT: torch.Tensor, low: float, high: float
) -> dict[str, torch.Tensor]:
    on_BT, has_token_B = mask_BT.bool(), mask_BT.bool().any(dim=1)
    tokens_N = divergence.expand(mask_BT.shape)[on_BT].double()
    rows_N = masked_mean(divergence.expand(mask_BT.shape).double(), mask_BT, dim=1)[has_token_B]
    counted_N = tokens_N if divergence.shape == mask_BT.shape else rows_N
    return {
        "mean": tokens_N.mean(),
        "std": tokens_N.clamp(low, high).std(correction=0),
        "max": counted_N.max(),
        "min": counted_N.min(),
        "fraction_high": (counted_N > high).double().mean(),
        "fraction_low": (counted_N < low).double().mean(),
        "seq_mean": rows_N.mean(),
        "seq_std": rows_N.std() if len(rows_N) > 1 else rows_N.new_zeros(()),
        "seq_max": rows_N.max(),
        "seq_min": rows_N.min(),
        "seq_max_deviation": rows_N.abs().max(),
        "seq_fraction_high": (rows_N > high).double().mean(),
        "seq_fraction_low": (rows_N < low).double().mean(),
    }
