"""Off-policy samples: token ages in weight versions, their metrics, their mask and importance weights.

Pure functions on a batch, called by the trainer in the driver. Shapes: S rows, R response tokens. The age of a token is
the version of the policy that is about to be trained minus the version that generated the token: 0 is on-policy.
"""

import torch

from hybridrl.algos.rollout_correction import correction_stats, log_ratio, rollout_is_weights
from hybridrl.config.schema.ppo import RolloutCorrectionConfig
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


def apply_rollout_correction(batch: DataProto, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Add `rollout_is_weights` (S, R) float32 to the batch, in place; return `rollout_corr/...` metrics."""
    assert config.rollout_is is not None  # `corrects_rollout`: the step has no such stage otherwise
    columns = batch.batch
    old, rollout, mask = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    weights = rollout_is_weights(old, rollout, mask, level=config.rollout_is, threshold=config.rollout_is_threshold)
    columns["rollout_is_weights"] = weights
    return {
        f"rollout_corr/{name}": value
        for name, value in correction_stats(weights, log_ratio(old, rollout, mask), mask).items()
    }
