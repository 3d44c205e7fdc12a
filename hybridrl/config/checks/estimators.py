"""Rules over the settings of single advantage estimators. `rules.py` lists them."""

from hybridrl.config.checks.rollout import Problems
from hybridrl.config.schema.ppo import AlgorithmConfig, PPOConfig

NO_KL_IN_REWARD = {
    "gdpo": "gdpo reads the rewards of gdpo_reward_keys, which have no KL",
    "maxrl": "maxrl needs rewards of 0 or more",
}
"""Estimators that cannot have the KL in the reward, and why."""
NOT_NORMALISED = {
    "gdpo": "gdpo normalises its rewards itself",
    "maxrl": "maxrl needs the scores as they are",
    "remax": "the greedy baseline of remax is not normalised",
}
"""Estimators that cannot have normalised rewards, and why."""


def gdpo_problems(config: PPOConfig) -> Problems:
    """Yield rewards of gdpo that are missing, named twice, without a weight, or without effect."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo" and not keys:
        yield "algorithm.gdpo_reward_keys=[]: gdpo needs the rewards it combines, for instance [score,format]"
    if len(set(keys)) < len(keys):
        yield f"algorithm.gdpo_reward_keys={keys}: names a reward twice; give it a weight instead"
    if weights and len(weights) != len(keys):
        yield f"algorithm.gdpo_reward_weights={weights}: must have one weight for each of gdpo_reward_keys={keys}"
    for key, value in (("gdpo_reward_keys", keys), ("gdpo_reward_weights", weights)):
        if value and name != "gdpo":
            yield f"algorithm.{key}={value}: only algorithm.adv_estimator=gdpo reads it, not {name}; leave it out"


def scale_problems(config: PPOConfig) -> Problems:
    """Yield changes of the rewards that the estimator cannot have."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    if algorithm.use_kl_in_reward and name in NO_KL_IN_REWARD:
        yield f"algorithm.use_kl_in_reward=true: {NO_KL_IN_REWARD[name]}; set actor_rollout_ref.actor.use_kl_loss=true"
    if algorithm.normalize_reward and name in NOT_NORMALISED:
        yield f"algorithm.normalize_reward=true: {NOT_NORMALISED[name]}; leave it out"


def estimator_setting_problems(config: PPOConfig) -> Problems:
    """Yield settings of other estimators that have no effect, or that this one cannot do without."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    if algorithm.lam_alpha != AlgorithmConfig().lam_alpha and name != "vapo":
        yield f"algorithm.lam_alpha={algorithm.lam_alpha}: only algorithm.adv_estimator=vapo reads it; leave it out"
    if config.actor_rollout_ref.actor.calculate_sum_pi_squared is False and name.endswith("optimal_token_baseline"):
        yield f"actor_rollout_ref.actor.calculate_sum_pi_squared=false: {name} needs it; leave the setting out"
