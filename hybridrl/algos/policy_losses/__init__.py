"""Policy losses: from log-probs and advantages to one loss per token."""

# Imported so that their losses enter the registry.
from hybridrl.algos.policy_losses import bypass, covariance, smooth, weighted  # noqa: F401
from hybridrl.algos.policy_losses.clipped import geo_mean, gspo, vanilla
from hybridrl.algos.policy_losses.registry import (
    OWN_AGG_MODES,
    POLICY_LOSSES,
    PolicyLoss,
    get_policy_loss,
    register_policy_loss,
)

__all__ = [
    "OWN_AGG_MODES",
    "POLICY_LOSSES",
    "PolicyLoss",
    "geo_mean",
    "get_policy_loss",
    "gspo",
    "register_policy_loss",
    "vanilla",
]
