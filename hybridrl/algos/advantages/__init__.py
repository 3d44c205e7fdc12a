"""Advantage estimators: from token rewards to how much better each token was than expected."""

from hybridrl.algos.advantages.estimator import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    get_adv_estimator,
    register_adv_est,
)
from hybridrl.algos.advantages.groups import gdpo, gpg, grpo, grpo_passk, maxrl, opo, reinforce_plus_plus_baseline, rloo
from hybridrl.algos.advantages.rejection import raft, star
from hybridrl.algos.advantages.temporal import gae, reinforce_plus_plus, remax, vapo
from hybridrl.algos.advantages.token_baseline import optimal_token_baseline, tir_optimal_token_baseline

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "gae",
    "gdpo",
    "get_adv_estimator",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "raft",
    "register_adv_est",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "star",
    "tir_optimal_token_baseline",
    "vapo",
]
