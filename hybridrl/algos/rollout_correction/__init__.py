"""Correct for samples of another policy: older weights, or the same weights in another engine.

Three policies are told apart: pi_rollout generated the sample (the behaviour policy), pi_old is the policy that is
about to be trained (the proximal policy), and pi is the one that is being trained.
"""

from hybridrl.algos.rollout_correction.mismatch import mismatch_stats
from hybridrl.algos.rollout_correction.rejection import DIVERGENCES, Rejection, rejection_mask, rejection_stats
from hybridrl.algos.rollout_correction.weights import (
    MAX_LOG_RATIO,
    effective_sample_share,
    importance_ratios,
    log_ratio,
    normalize_weights,
    rollout_is_weights,
    weight_stats,
)

__all__ = [
    "DIVERGENCES",
    "MAX_LOG_RATIO",
    "Rejection",
    "effective_sample_share",
    "importance_ratios",
    "log_ratio",
    "mismatch_stats",
    "normalize_weights",
    "rejection_mask",
    "rejection_stats",
    "rollout_is_weights",
    "weight_stats",
]
