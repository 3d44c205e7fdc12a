"""The step of PPO and its relatives, as a table of stages with their roles and columns.

The table is the dataflow of a job. `RayPPOTrainer.stages` binds each line to the method of that name. Overlap and
failover are derived from it, and `hybridrl job graph` draws it. Nothing is started here.
"""

from collections.abc import Collection

from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.config import PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.framework import StageSpec
from hybridrl.trainer.roles import Role

# Columns that a model reads. All other columns of a batch stay in the driver.
MODEL_INPUT = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
PROMPT_INPUT = ("input_ids", "attention_mask", "position_ids", "seeds")
SCORES = ("token_level_scores", "reward_valid")


def uses_critic(config: PPOConfig) -> bool:
    """Return whether a critic is trained: `critic.enable`, or if unset, whether the advantage estimator needs one."""
    return (
        get_adv_estimator(config.algorithm.adv_estimator).needs_critic
        if config.critic.enable is None
        else config.critic.enable
    )


def uses_reference(config: PPOConfig) -> bool:
    """Return whether the KL to a reference policy is in the loss or in the reward."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def corrects_rollout(config: PPOConfig) -> bool:
    """Return whether samples get importance weights of the trainer's policy over the rollout's."""
    return config.algorithm.rollout_correction.rollout_is is not None


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
    if uses_critic(config) and Role.Critic not in roles:
        raise ConfigError(f"algorithm.adv_estimator={estimator} needs a critic; map Role.Critic to a worker class")
    if uses_reference(config) and not {Role.RefPolicy, Role.ActorRolloutRef} & set(roles):
        raise ConfigError(
            "KL to the reference policy is on, but no role has a reference policy; map Role.RefPolicy to a worker class"
        )
    if not has_reward and Role.RewardModel not in roles:
        raise ConfigError("no reward is configured; pass reward_fn, or map Role.RewardModel to a worker class")


def ppo_stages(config: PPOConfig, roles: Collection[Role]) -> list[tuple[str, StageSpec]]:
    """Return (method of the trainer, stage spec) for every stage of a step, in order.

    A stage that is not pure runs exactly once per step. A stage without a role runs in the driver itself.
    """
    actor = next((str(role) for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor) if role in roles), None)
    rollout = str(Role.Rollout) if Role.Rollout in roles else actor
    reference = str(Role.RefPolicy) if Role.RefPolicy in roles else actor
    critic, reward_model = str(Role.Critic), str(Role.RewardModel) if Role.RewardModel in roles else None
    values = ("values",) if uses_critic(config) else ()
    weights = ("rollout_is_weights",) if corrects_rollout(config) else ()
    kl_loss = ("ref_log_prob",) if config.actor_rollout_ref.actor.use_kl_loss else ()
    kl_reward = ("old_log_probs", "ref_log_prob") if config.algorithm.use_kl_in_reward else ()
    sampled = ("rollout_log_probs",) if config.actor_rollout_ref.rollout.calculate_log_probs else ()
    replayed = ("prompts", *MODEL_INPUT, *sampled, *SCORES)
    trained = (*MODEL_INPUT, "old_log_probs", "advantages", "reward_valid", *weights, *kl_loss)

    table = [
        _stage("next_batch", "next_batch", writes=PROMPT_INPUT, once=True),
        _stage(
            "gen", "generate", rollout, PROMPT_INPUT, ("prompts", *MODEL_INPUT, *sampled), once=config.trainer.lag > 0
        ),
        _stage("reward", "reward", reward_model, ("prompts", "responses", "response_mask"), SCORES),
        *([_stage("replay", "replay", None, replayed, replayed, once=True)] if config.trainer.replay.groups else ()),
        _stage("old_log_prob", "old_log_prob", actor, (*MODEL_INPUT, *sampled), ("old_log_probs",)),
    ]
    if weights:
        reads = ("response_mask", "old_log_probs", "rollout_log_probs")
        table.append(_stage("rollout_correction", "rollout_correction", None, reads, weights))
    if uses_reference(config):
        table.append(_stage("ref", "ref_log_prob", reference, MODEL_INPUT, ("ref_log_prob",)))
    if values:
        table.append(_stage("values", "values", critic, MODEL_INPUT, values))
    reads = ("response_mask", *SCORES, *kl_reward, *values)
    table.append(_stage("adv", "advantage", None, reads, ("token_level_rewards", "advantages", "returns"), once=True))
    if values:
        table.append(
            _stage(
                "update_critic", "update_critic", critic, (*MODEL_INPUT, "reward_valid", *values, "returns"), once=True
            )
        )
    table += [
        _stage("update_actor", "update_actor", actor, trained, once=True),
        _stage("update_weights", "update_weights", rollout, once=True),
        _stage("testing", "validate", rollout),
        _stage("log", "log", once=True),
        _stage("save_checkpoint", "save_checkpoint", once=True),
    ]
    return table


def _stage(
    name: str, method: str, role: str | None = None, reads: tuple = (), writes: tuple = (), *, once: bool = False
) -> tuple[str, StageSpec]:
    return method, StageSpec(name, role, tuple(dict.fromkeys(reads)), writes, pure=not once)
