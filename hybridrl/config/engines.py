"""Settings of the training engine that a config chooses, for each role.

A built-in engine has a section of the schema. An engine of the user's has `engine_config` (of the actor, or of a
supervised program), which the dataclass `Config` of the engine's class validates. Driver and workers call this module.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config.build import from_section
from hybridrl.config.introspection import to_dict
from hybridrl.config.plugs import ENGINES
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.config.schema.workers import ActorConfig, ActorRolloutRefConfig, CriticConfig, RefConfig

SECTIONS = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config", "megatron": "megatron"}
"""Section with the settings of each built-in engine, of `actor_rollout_ref.actor` and of supervised programs."""
ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
Batching = tuple[bool, int, int | None]
"""Whether a token budget cuts micro-batches, the budget, and the rows of a micro-batch (None: the budget decides)."""


def engine_settings(actor: ActorConfig) -> EngineSettings:
    """Return the settings of the actor's engine.

    Raises:
        ConfigError: The engine cannot be imported, or its settings are wrong.
    """
    return _chosen_settings(actor, prefix=f"{ACTOR}.")


def supervised_engine_settings(config: SupervisedConfig) -> EngineSettings:
    """Return the settings of the engine of a program that trains one model on fixed data.

    Raises:
        ConfigError: The engine cannot be imported, or its settings are wrong.
    """
    return _chosen_settings(config, prefix="")


def ref_engine_settings(config: PPOConfig) -> EngineSettings:
    """Return the settings of the reference policy's engine: the actor's with an offload of its own."""
    policy = config.actor_rollout_ref
    return engine_settings(policy.actor).with_offload(params=policy.ref.fsdp_config.param_offload, optimizer=False)


def critic_engine_settings(config: PPOConfig) -> EngineSettings:
    """Return the settings of the critic's engine: the actor's, except for its offload and `critic.engine_config`."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    settings = (
        engine_settings(actor)
        if actor.strategy in SECTIONS
        else _own_settings(critic.strategy, {**actor.engine_config, **critic.engine_config}, prefix=f"{CRITIC}.")
    )
    offload = critic.fsdp_config
    return settings.with_offload(params=offload.param_offload, optimizer=offload.optimizer_offload)


def reward_model_engine_settings(config: PPOConfig) -> EngineSettings:
    """Return the settings of the reward model's engine: the actor's without offload."""
    return engine_settings(config.actor_rollout_ref.actor).with_offload(params=False, optimizer=False)


def update_batching(settings: ActorConfig | CriticConfig) -> Batching:
    """Return how the rows of a role that PPO trains are cut."""
    return settings.use_dynamic_bsz, settings.ppo_max_token_len_per_gpu, settings.ppo_micro_batch_size_per_gpu


def log_prob_batching(settings: RefConfig | RolloutConfig) -> Batching:
    """Return how rows are cut for log-probs: of the reference, or before an update."""
    by_tokens, max_rows = settings.log_prob_use_dynamic_bsz, settings.log_prob_micro_batch_size_per_gpu
    return by_tokens, settings.log_prob_max_token_len_per_gpu, max_rows


def rank_unit(config: PPOConfig) -> int:
    """Return the number that divides every possible number of ranks.

    So many processes share a copy of the model, in the engine or in a rollout on the same devices.
    """
    rollout, unit = config.actor_rollout_ref.rollout, engine_settings(config.actor_rollout_ref.actor).rank_unit
    return math.lcm(unit, 1 if rollout.n_gpus_per_node else rollout.tensor_model_parallel_size)


def single_process_layout(policy: ActorRolloutRefConfig) -> ActorRolloutRefConfig:
    """Return the settings with an engine for one process, which loads a checkpoint of any layout."""
    actor, one = policy.actor, engine_settings(policy.actor).single_process()
    section = SECTIONS.get(actor.strategy)
    changed = {section: one} if section else {"engine_config": to_dict(one)}
    return replace(policy, actor=replace(actor, **changed))


def _chosen_settings(chosen: ActorConfig | SupervisedConfig, *, prefix: str) -> EngineSettings:
    if chosen.strategy in SECTIONS:
        return getattr(chosen, SECTIONS[chosen.strategy])
    return _own_settings(chosen.strategy, chosen.engine_config, prefix=prefix)


def _own_settings(strategy: str, values: Mapping[str, Any], *, prefix: str) -> EngineSettings:
    """Return `engine_config` as the dataclass that the engine's class declares."""
    schema = getattr(ENGINES.lookup(strategy, setting=f"{prefix}strategy"), "Config", EngineSettings)
    return from_section(schema, values, key=f"{prefix}engine_config")
