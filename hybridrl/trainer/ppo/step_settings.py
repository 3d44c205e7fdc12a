"""Conditions and roles of PPO's stages, from the settings.

The list of the stages is `RayPPOTrainer.step`, and the table of columns `columns.py`. Nothing is started here.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.config import PPOConfig
from hybridrl.config.schema.distillation import FULL_MODES
from hybridrl.config.schema.rollout_correction import correction_plan
from hybridrl.errors import ConfigError
from hybridrl.trainer.roles import Role


@dataclass(frozen=True)
class StepSettings:
    """What decides about the stages and columns of a step.

    Attributes:
        config: Settings of the job.
        roles: Roles with a worker class.
        trainer: The trainer's class. Its own stages may read more.
    """

    config: PPOConfig
    roles: Collection[Role]
    trainer: type


def uses_critic(config: PPOConfig) -> bool:
    """Return whether a critic is trained: `critic.enable`, or if unset, whether the advantage estimator needs one.

    A distillation without task rewards uses no estimator.
    """
    if config.only_generates:
        return False
    if config.critic.enable is not None:
        return config.critic.enable
    return config.distillation.task_rewards and get_adv_estimator(config.algorithm.adv_estimator).needs_critic


def uses_reference(config: PPOConfig) -> bool:
    """Return whether the KL to a reference policy is in the loss or in the reward."""
    uses_kl = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return uses_kl and not config.only_generates


def scores_reference_with_actor(settings: StepSettings) -> bool:
    """Return whether one call computes the log-probs of the actor and those of its reference.

    With stages of the user's own that score tokens, each has its own call.
    """
    config = settings.config
    own_reference = config.actor_rollout_ref.model.uses_lora and Role.RefPolicy not in settings.roles
    has_own_stages = overrides(settings.trainer, SCORING_STAGES) or config.trainer.middleware
    return uses_reference(config) and own_reference and not has_own_stages


def has_reference_stage(settings: StepSettings) -> bool:
    """Return whether the log-probs of the reference policy have a call of their own."""
    with_actor = computes_old_log_probs(settings) and scores_reference_with_actor(settings)
    return uses_reference(settings.config) and not with_actor


def corrects_samples(config: PPOConfig) -> bool:
    """Return whether the rollout correction weighs or rejects tokens before the update."""
    plan = correction_plan(config.algorithm.rollout_correction)
    return plan.weighs or plan.rejects


def bypasses_old_log_prob(config: PPOConfig) -> bool:
    """Return whether the rollout's log-probs stand for those of the policy before the update."""
    return correction_plan(config.algorithm.rollout_correction).bypass_mode


def overrides(trainer: type, names: Collection[str]) -> bool:
    """Return whether a trainer class of the user's own, or one of its ancestors, defines one of these methods."""
    own = [cls for cls in trainer.__mro__ if not cls.__module__.startswith("hybridrl.")]
    return any(name in vars(cls) for cls in own for name in names)


SCORING_STAGES = ("step", "stages", "old_log_prob", "ref_log_prob")
"""Methods of a trainer that decide which call scores tokens."""
MAY_READ_OLD_LOG_PROBS = (
    *(*SCORING_STAGES, "rollout_correction", "teacher_log_prob", "values", "advantage"),
    *("update_critic", "update_actor"),
)


def computes_old_log_probs(settings: StepSettings) -> bool:
    """Return whether a forward pass before the update computes `old_log_probs`.

    As set, or if unset, whether anything may read them, such as stages of the user's own. Without the pass the update's
    own log-probs are the old ones.
    """
    config, chosen = settings.config, settings.config.actor_rollout_ref.actor.calculate_old_log_probs
    overridden = overrides(settings.trainer, MAY_READ_OLD_LOG_PROBS)
    wanted = overridden or next(_old_log_prob_readers(config), None) is not None if chosen is None else chosen
    return wanted and not bypasses_old_log_prob(config)


def compares_log_probs(config: PPOConfig) -> bool:
    """Return whether advantages are computed from the policy's log-probs, too."""
    return config.algorithm.use_kl_in_reward or config.distillation.enabled or uses_sum_pi_squared(config)


def has_old_log_probs(settings: StepSettings) -> bool:
    """Return whether the batch has `old_log_probs` before the update: computed ones, or those of the rollout."""
    return computes_old_log_probs(settings) or bypasses_old_log_prob(settings.config)


def _old_log_prob_readers(config: PPOConfig) -> Iterator[str]:
    """Yield what needs log-probs from before the update: several optimizer steps, or somebody who reads them."""
    actor, algorithm, trainer = config.actor_rollout_ref.actor, config.algorithm, config.trainer
    num_prompts = config.data.train_batch_size + trainer.replay.groups
    if actor.ppo_epochs > 1:
        yield f"actor_rollout_ref.actor.ppo_epochs={actor.ppo_epochs}: later epochs train another policy"
    if num_prompts > actor.ppo_mini_batch_size:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}: a step of {num_prompts} prompts "
            "has several mini-batches, and later ones train another policy"
        )
    if corrects_samples(config):
        yield "algorithm.rollout_correction compares them with those of the rollout"
    if algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward=true reads them"
    if uses_sum_pi_squared(config):
        yield "sum_pi_squared is computed with them"
    if config.distillation.enabled:
        yield "distillation.enabled=true reads them"
    if actor.policy_loss.loss_mode in ("clip_cov", "kl_cov"):
        yield f"actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode} selects tokens by them"
    if trainer.critic_warmup:
        yield f"trainer.critic_warmup={trainer.critic_warmup}: steps without an update report the policy's entropy"
    yield from _pass_readers(config)


def _pass_readers(config: PPOConfig) -> Iterator[str]:
    """Yield what else needs their pass."""
    if config.actor_rollout_ref.actor.router_replay.mode == "R2":
        yield "actor_rollout_ref.actor.router_replay.mode=R2 records experts in their pass"
    if config.trainer.middleware:
        yield "trainer.middleware may read them"


def uses_greedy_baseline(config: PPOConfig) -> bool:
    """Return whether the advantage estimator needs the score of a greedy response to each prompt."""
    return "baseline_B" in _estimator_needs(config)


def uses_components(config: PPOConfig) -> bool:
    """Return whether the advantage estimator reads several rewards of each response."""
    return "components_BK" in _estimator_needs(config)


def uses_sum_pi_squared(config: PPOConfig) -> bool:
    """Return whether the actor computes sum_v pi_v^2: as set, or if unset, whether the estimator needs it."""
    chosen = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    return "sum_pi_squared_BT" in _estimator_needs(config) if chosen is None else chosen


def _estimator_needs(config: PPOConfig) -> tuple[str, ...]:
    """Return the estimator's further arguments; none if a distillation without rewards runs no estimator."""
    return get_adv_estimator(config.algorithm.adv_estimator).needs if config.distillation.task_rewards else ()


def filters_groups(config: PPOConfig) -> bool:
    """Return whether a step chooses among the groups that it generates: by their rewards, or by their lengths."""
    return config.algorithm.filter_groups.chooses


def uses_agents(config: PPOConfig) -> bool:
    """Return whether agent loops generate the responses."""
    return config.actor_rollout_ref.rollout.mode == "async"


def trains_branches(config: PPOConfig) -> bool:
    """Return whether a step trains all rows that agent loops return for a sample."""
    return uses_agents(config) and config.actor_rollout_ref.rollout.agent.train_branches


def teacher_gives(config: PPOConfig) -> str:
    """Return tokens whose log-probs a teacher gives: `sampled`, also the `top` ones, or also `all`; "" without one."""
    teacher = config.distillation
    if not teacher.enabled or teacher.samples_only:
        return "sampled" if teacher.enabled else ""
    return "all" if teacher.distillation_loss.loss_mode in FULL_MODES else "top"


def has_reward_model(settings: StepSettings) -> bool:
    """Return whether a reward model scores the responses."""
    return Role.RewardModel in settings.roles


def trains_what_it_generates(config: PPOConfig) -> bool:
    """Return whether a step trains exactly the responses that it generated, one row each."""
    others = filters_groups(config) or config.algorithm.select_samples.k or trains_branches(config)
    return not (config.trainer.rollout_lag or others or uses_greedy_baseline(config))


def samples_per_group(config: PPOConfig) -> int:
    """Return how many samples of each prompt a step trains on."""
    return config.algorithm.select_samples.k or config.actor_rollout_ref.rollout.n


def check_roles(config: PPOConfig, roles: Collection[Role], *, has_reward: bool, has_agent_loops: bool) -> None:
    """Raise ConfigError if a stage has no role or function to execute it.

    Args:
        config: Settings of the job.
        roles: Roles with a worker class.
        has_reward: Whether a reward function is given.
        has_agent_loops: Whether an `AgentLoopManager` is given.
    """
    estimator, mode = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.mode
    if has_agent_loops == (mode == "sync"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.mode={mode}: agent_loops={'given' if has_agent_loops else 'None'}; pass "
            "agent_loops=AgentLoopManager(...) with mode=async, and only then"
        )
    if uses_sum_pi_squared(config) and bypasses_old_log_prob(config):
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} reads sum_pi_squared, which the actor computes with its log-probs, "
            "and algorithm.rollout_correction.bypass_mode leaves that pass out; set bypass_mode=false, or take another "
            "estimator"
        )
    if config.algorithm.filter_groups.defers and uses_greedy_baseline(config):
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} needs a greedy response to each prompt, however long, and "
            "algorithm.filter_groups.order=tail_batching ends long responses; use order=shortest, or another estimator"
        )
    _check_old_log_probs(config)
    if uses_critic(config) and Role.Critic not in roles:
        raise ConfigError(f"algorithm.adv_estimator={estimator} needs a critic; map Role.Critic to a worker class")
    has_reference = config.actor_rollout_ref.model.uses_lora or {Role.RefPolicy, Role.ActorRolloutRef} & set(roles)
    if uses_reference(config) and not has_reference:
        raise ConfigError(
            "KL to the reference policy is on, but no role has a reference policy; map Role.RefPolicy to a worker class"
        )
    if config.distillation.enabled and Role.TeacherModel not in roles:
        raise ConfigError(
            "distillation.enabled=true, but no role is a teacher; map Role.TeacherModel to a worker class"
        )
    if config.distillation.task_rewards and not has_reward and Role.RewardModel not in roles:
        raise ConfigError("no reward is configured; pass reward_fn, or map Role.RewardModel to a worker class")


def _check_old_log_probs(config: PPOConfig) -> None:
    """Raise ConfigError for a setting of the stage that cannot be met. Middleware that reads no log-probs is fine."""
    key = "actor_rollout_ref.actor.calculate_old_log_probs"
    chosen = config.actor_rollout_ref.actor.calculate_old_log_probs
    if bypasses_old_log_prob(config):
        if chosen:
            raise ConfigError(
                f"{key}=true: algorithm.rollout_correction.bypass_mode takes the rollout's log-probs; leave one out"
            )
        return
    needed = [reason for reason in _old_log_prob_readers(config) if not reason.startswith("trainer.middleware")]
    if chosen is False and needed:
        raise ConfigError(f"{key}=false: {needed[0]}; leave the setting out")


@dataclass(frozen=True)
class StageRoles:
    """Names of the roles that execute the stages of a step.

    Attributes:
        reward_model: None: the driver scores alone.
    """

    actor: str | None
    rollout: str | None
    reference: str | None
    critic: str
    reward_model: str | None
    teacher: str


def stage_roles(roles: Collection[Role]) -> StageRoles:
    """Return which of a job's roles executes which stages."""
    actor = next((role for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor) if role in roles), None)
    return StageRoles(
        actor=actor,
        rollout=Role.Rollout if Role.Rollout in roles else actor,
        reference=Role.RefPolicy if Role.RefPolicy in roles else actor,
        critic=Role.Critic,
        reward_model=Role.RewardModel if Role.RewardModel in roles else None,
        teacher=Role.TeacherModel,
    )


def max_token_age(config: PPOConfig) -> int | None:
    """Return the age above which tokens are left out of the loss; None: no token is."""
    return config.trainer.staleness if config.trainer.stale_tokens == "drop" else None


def max_sample_age(config: PPOConfig) -> int:
    """Return the age in weight versions that a sample may have in its step: `trainer.staleness`, or the lag."""
    return config.trainer.lag if config.trainer.staleness is None else config.trainer.staleness


def num_chunks(config: PPOConfig) -> int:
    """Return in how many parts a batch's responses are generated, each with the weights of another step."""
    return max(1, config.trainer.rollout_lag) if config.trainer.partial_rollout else 1
