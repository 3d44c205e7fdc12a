"""Rules on advantage estimators and policy losses, for `rules.py`."""

from collections.abc import Collection, Mapping

from hybridrl import config as settings
from hybridrl.config.build import Problems, idle_problems
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.workers import ActorConfig

OWN_FORMULA = "algorithm.path=[my_formulas.py] registers formulas of your own"
OWN_SETTINGS = {
    "gdpo": ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
    "vapo": ("algorithm.lam_alpha",),
}
"""Settings that one estimator alone reads."""
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


def estimator_setting_problems(config: PPOConfig) -> Problems:
    """Yield settings of other estimators, rewards that this one cannot have, and what it cannot do without."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    for owner, idle in OWN_SETTINGS.items():
        if name != owner:
            yield from idle_problems(config, *idle, why=f"with adv_estimator={name}, only with {owner}; leave it out")
    if algorithm.use_kl_in_reward and name in NO_KL_IN_REWARD:
        yield f"algorithm.use_kl_in_reward=true: {NO_KL_IN_REWARD[name]}; set actor_rollout_ref.actor.use_kl_loss=true"
    if algorithm.normalize_reward and name in NOT_NORMALISED:
        yield f"algorithm.normalize_reward=true: {NOT_NORMALISED[name]}; leave it out"
    if config.actor_rollout_ref.actor.calculate_sum_pi_squared is False and name.endswith("optimal_token_baseline"):
        yield f"actor_rollout_ref.actor.calculate_sum_pi_squared=false: {name} needs it; leave the setting out"
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo" and not keys:
        yield "algorithm.gdpo_reward_keys=[]: gdpo needs the rewards it combines, for instance [score,format]"
    if len(set(keys)) < len(keys):
        yield f"algorithm.gdpo_reward_keys={keys}: names a reward twice; give it a weight instead"
    if weights and len(weights) != len(keys):
        yield f"algorithm.gdpo_reward_weights={weights}: must have one weight for each of gdpo_reward_keys={keys}"


def estimator_problems(
    config: PPOConfig, *, known: Collection[str], group: Collection[str], critic: Collection[str]
) -> Problems:
    """Yield an unknown estimator, and settings without what it compares."""
    name, samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    chosen = config.algorithm.select_samples.k
    if name not in known:
        near = settings.suggest_name(name, known)
        yield f"algorithm.adv_estimator={name}: there is no such estimator; {near}; {OWN_FORMULA}"
    if not config.distillation.task_rewards:
        return  # no estimator is used
    if name in group and samples == 1:
        yield (
            f"actor_rollout_ref.rollout.n=1: algorithm.adv_estimator={name} compares several samples of a prompt; "
            "set actor_rollout_ref.rollout.n=2 or more"
        )
    if name in group and samples > 1 and chosen == 1:
        yield (
            f"algorithm.select_samples.k=1: algorithm.adv_estimator={name} compares several samples of a prompt; set "
            "k=2 or more, or an estimator that does not (star, reinforce_plus_plus)"
        )
    if name in critic and config.critic.enable is False:
        yield (
            f"critic.enable=false: algorithm.adv_estimator={name} needs values; leave out critic.enable, or "
            "use another estimator"
        )


def policy_loss_problems(config: PPOConfig, *, known: Collection[str], own_agg_modes: Mapping[str, str]) -> Problems:
    """Yield an unknown loss, and settings that it does not read or cannot do without."""
    name, mode = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.actor_rollout_ref.actor.loss_agg_mode
    if name in own_agg_modes and mode not in (own_agg_modes[name], ActorConfig().loss_agg_mode):
        yield f"actor_rollout_ref.actor.loss_agg_mode={mode}: {name} always uses {own_agg_modes[name]}; leave it out"
    scale = config.actor_rollout_ref.actor.loss_scale_factor
    if scale is not None and (name in own_agg_modes or mode != "seq-mean-token-sum-norm"):
        yield (
            f"actor_rollout_ref.actor.loss_scale_factor={scale}: only loss_agg_mode=seq-mean-token-sum-norm divides by "
            f"it, and this run uses {own_agg_modes.get(name, mode)}; leave it out"
        )
    if name == "dro" and config.actor_rollout_ref.actor.policy_loss.dro_beta is None:
        yield "actor_rollout_ref.actor.policy_loss.loss_mode=dro: needs policy_loss.dro_beta, the weight of its penalty"
    loss = config.actor_rollout_ref.actor.policy_loss
    if name == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"actor_rollout_ref.actor.policy_loss.clip_cov_lb={loss.clip_cov_lb:g}: no covariance is above it and "
            f"below policy_loss.clip_cov_ub={loss.clip_cov_ub:g}; lower it"
        )
    if name not in known:
        near = settings.suggest_name(name, known)
        yield f"actor_rollout_ref.actor.policy_loss.loss_mode={name}: there is no such loss; {near}; {OWN_FORMULA}"
