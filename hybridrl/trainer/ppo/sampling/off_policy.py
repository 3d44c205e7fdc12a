"""Off-policy samples: token ages in weight versions, their metrics, their mask and importance weights.

Pure functions on a batch, called by the trainer in the driver. Shapes: S rows, R response tokens. The age of a token is
the version of the policy that is about to be trained minus the version that generated the token: 0 is on-policy.
"""

import torch

from hybridrl.algos import rollout_correction
from hybridrl.config.schema.rollout_correction import CorrectionPlan
from hybridrl.protocol import DataProto


def token_ages(batch: DataProto, *, version: int) -> torch.Tensor:
    """Return the age of each token, (S, R) int64, meaningful where `response_mask` is 1."""
    columns = batch.batch
    if "token_versions" in columns.keys():
        return version - columns["token_versions"]
    return (version - columns["weights_version"])[:, None].expand_as(columns["responses"])


def staleness_metrics(batch: DataProto, *, version: int) -> dict[str, float]:
    """Return mean and maximum age over generated tokens, and the share of off-policy tokens."""
    ages = token_ages(batch, version=version)[batch.batch["response_mask"].bool()]
    if not len(ages):
        return {}
    return {
        "async/age_mean": float(ages.double().mean()),
        "async/age_max": float(ages.max()),
        "async/off_policy_fraction": float((ages > 0).double().mean()),
    }


def fresh_mask(batch: DataProto, *, version: int, staleness: int) -> torch.Tensor:
    """Return `response_mask` (S, R) without the tokens older than `staleness`."""
    mask = batch.batch["response_mask"]
    return torch.where(token_ages(batch, version=version) <= staleness, mask, torch.zeros_like(mask))


def apply_rollout_correction(batch: DataProto, plan: CorrectionPlan) -> dict[str, float]:
    """Add the columns of the rollout correction to the batch, in place; return `rollout_corr/...` metrics.

    `rollout_is_weights` (S, R) float32 with weights, and `rollout_rs_mask` (S, R) int64 with rejections: 1 on the
    tokens of `response_mask` that are kept. `response_mask` itself stays. Both are computed from all tokens of
    the mask, and statistics are those before `batch_normalize`.
    """
    columns = batch.batch
    samples = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    stats: dict[str, float] = {}
    if plan.rollout_is is not None:
        columns["rollout_is_weights"], stats = _weights(samples, plan)
    if plan.rejections:
        rejections = [rollout_correction.Rejection(*bounds) for bounds in plan.rejections]
        kept = rollout_correction.rejection_mask(*samples, rejections)
        columns["rollout_rs_mask"] = kept.to(columns["response_mask"].dtype)
        stats |= rollout_correction.rejection_stats(*samples, rejections)
    return {f"rollout_corr/{name}": value for name, value in stats.items()}


Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _weights(samples: Samples, plan: CorrectionPlan) -> tuple[torch.Tensor, dict[str, float]]:
    assert plan.rollout_is is not None
    mask, level, high, low = samples[2], plan.rollout_is, plan.is_threshold, plan.is_lower
    weights = rollout_correction.rollout_is_weights(*samples, level=level, threshold=high, lower=low)
    ratios = rollout_correction.importance_ratios(*samples, level=level)
    stats = rollout_correction.weight_stats(weights, ratios, mask, level=level, threshold=high, lower=low)
    if plan.batch_normalize:
        weights, mean = rollout_correction.normalize_weights(weights, mask, level=level)
        stats["rollout_is_batch_norm_factor"] = float(mean)
    return weights, stats
