"""Formulas: pure functions of tensors and numbers.

They take no config and no batch, start no process and log nothing.
"""

from hybridrl.algos.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    get_adv_estimator,
    register_adv_est,
)
from hybridrl.algos.aggregate import agg_loss, loss_counts
from hybridrl.algos.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty, kl_penalty
from hybridrl.algos.masked import masked_mean, masked_sum, masked_var, masked_whiten
from hybridrl.algos.partition import balanced_partition, micro_batches
from hybridrl.algos.policy_losses import POLICY_LOSSES, PolicyLoss, get_policy_loss, register_policy_loss
from hybridrl.algos.rollout_correction import (
    Rejection,
    log_ratio,
    mismatch_stats,
    rejection_mask,
    rollout_is_weights,
)
from hybridrl.algos.token_stats import log_probs_and_entropy
from hybridrl.algos.value_losses import clipped_value_loss, explained_variance

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "POLICY_LOSSES",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "PolicyLoss",
    "Rejection",
    "agg_loss",
    "apply_kl_penalty",
    "balanced_partition",
    "clipped_value_loss",
    "explained_variance",
    "get_adv_estimator",
    "get_policy_loss",
    "kl_penalty",
    "log_probs_and_entropy",
    "log_ratio",
    "loss_counts",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "micro_batches",
    "mismatch_stats",
    "register_adv_est",
    "register_policy_loss",
    "rejection_mask",
    "rollout_is_weights",
]
