"""Advantage estimators: from token rewards to how much better each token was than expected."""

from hybridrl.algos.advantages.estimator import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    get_adv_estimator,
    register_adv_est,
)
from hybridrl.algos.advantages.groups import gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, rloo
from hybridrl.algos.advantages.temporal import gae, reinforce_plus_plus

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "gae",
    "get_adv_estimator",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "register_adv_est",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
]
