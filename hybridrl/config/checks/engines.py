"""Rules for training engines: settings without effect, what an engine declares that it cannot do, token budgets.

The driver checks them before anything starts. Imports no built-in engine.
"""

import json
import os
from collections.abc import Collection
from dataclasses import fields

from hybridrl.config import checks
from hybridrl.config.build import Problems, idle_problems
from hybridrl.config.engines import SECTIONS, critic_engine_settings, engine_settings, supervised_engine_settings
from hybridrl.config.introspection import value_at
from hybridrl.config.plugs import ENGINES
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.rollout_correction import correction_plan
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.config.schema.workers import ActorConfig, FSDPConfig, ModelConfig
from hybridrl.errors import ConfigError

MODE = "actor_rollout_ref.actor.router_replay.mode"
RETURNED = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def engine_problems(config: PPOConfig) -> Problems:
    """Yield problems of the actor's engine, and settings of engines that are not used."""
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
    used = SECTIONS.get(actor.strategy)
    idle = [f"{key}.{section}" for section in SECTIONS.values() if section != used]
    if used:
        idle += [f"{key}.engine_config", "critic.engine_config"]
    yield from idle_problems(config, *idle, why=f"with {key}.strategy={actor.strategy}; leave it out")
    if used == "megatron":
        yield from checks.megatron.policy_problems(config)
    if used == "fsdp_config":
        size = config.trainer.nnodes * config.trainer.n_gpus_per_node
        models = {config.actor_rollout_ref.model.path, config.critic.model.path, config.reward_model.model.path}
        yield from sequence_parallel_problems(actor.fsdp_config, world_size=size, models=models, key=f"{key}.{used}")
    try:
        settings = engine_settings(actor)
    except ConfigError as error:
        yield str(error)
    else:
        yield from _layout_problems(config, settings)


def supervised_engine_problems(config: SupervisedConfig) -> Problems:
    """Yield problems of the engine of a program that trains one model on fixed data."""
    used = SECTIONS.get(config.strategy)
    idle = [section for section in SECTIONS.values() if section != used]
    if used:
        idle.append("engine_config")
    yield from idle_problems(config, *idle, why=f"with strategy={config.strategy}; leave it out")
    if used == "megatron":
        yield from checks.megatron.supervised_problems(config)
    size = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if used == "fsdp_config":
        yield from sequence_parallel_problems(config.fsdp_config, world_size=size, models={config.model.path}, key=used)
    try:
        settings = supervised_engine_settings(config)
    except ConfigError as error:
        yield str(error)
    else:
        chosen = f"strategy={config.strategy}"
        yield from _adapter_problems(config.model, settings, key="model", chosen=chosen)
        yield from _size_problems(config.strategy, settings, size=size, chosen=chosen)


def sequence_parallel_problems(
    settings: FSDPConfig, *, world_size: int, models: Collection[str | None], key: str
) -> Problems:
    """Yield why processes cannot share the tokens of a micro-batch.

    Args:
        settings: Of the FSDP engine.
        world_size: Its processes.
        models: Paths of the models; what is not a local directory is checked when it is loaded.
        key: Section of the setting.
    """
    size = settings.ulysses_sequence_parallel_size
    if size == 1:
        return
    name = f"{key}.ulysses_sequence_parallel_size={size}"
    if world_size % size:
        yield (
            f"{name}: does not divide the {world_size} processes (trainer.nnodes * trainer.n_gpus_per_node); use a "
            "divisor of it"
        )
    for path in sorted(path for path in models if path):
        found = checks.megatron.local_model_config(path) or {}
        if "vision_config" in found:
            yield f"{name}: {path} reads images, whose tokens are not shared between processes; use 1"
        heads = found.get("text_config", found).get("num_attention_heads", size)
        if heads % size:
            yield f"{name}: {path} has num_attention_heads={heads}, which {size} processes cannot share; use a divisor"


def sequence_parts(trained: ActorConfig | SupervisedConfig) -> int:
    """Return how many processes share the tokens of a micro-batch; token budgets are those of one."""
    is_fsdp = SECTIONS.get(trained.strategy) == "fsdp_config"
    return trained.fsdp_config.ulysses_sequence_parallel_size if is_fsdp else 1


def routing_problems(config: PPOConfig) -> Problems:
    """Yield a replay that the engine cannot do, or that has no routes, and routes that nothing replays."""
    policy = config.actor_rollout_ref
    mode, returned = policy.actor.router_replay.mode, policy.rollout.enable_rollout_routing_replay
    if mode == "R3" and not returned:
        yield f"{MODE}=R3: replays the experts that the rollout returns; set {RETURNED}=true"
    if mode != "R3" and returned:
        yield f"{RETURNED}=true: nothing reads the experts with {MODE}={mode}; set {MODE}=R3, or leave it out"
    if mode == "R2" and correction_plan(config.algorithm.rollout_correction).bypass_mode:
        yield (
            f"{MODE}=R2: records experts in the pass for old_log_probs, and algorithm.rollout_correction.bypass_mode "
            "leaves that pass out; set R3, or bypass_mode=false"
        )
    try:
        can_replay = engine_settings(policy.actor).supports_routing_replay
    except ConfigError:  # `engine_problems` reports it
        return
    if mode != "disabled" and not can_replay:
        yield (
            f"{MODE}={mode}: actor_rollout_ref.actor.strategy={policy.actor.strategy} does not replay experts; set "
            "disabled, or strategy=fsdp"
        )


def _layout_problems(config: PPOConfig, settings: EngineSettings) -> Problems:
    """Yield what the actor's engine cannot do, by its own declarations."""
    policy, size = config.actor_rollout_ref, config.trainer.nnodes * config.trainer.n_gpus_per_node
    chosen = f"actor_rollout_ref.actor.strategy={policy.actor.strategy}"
    own = {field.name for field in fields(settings)}
    yield from _adapter_problems(policy.model, settings, key="actor_rollout_ref.model", chosen=chosen)
    yield from _size_problems(policy.actor.strategy, settings, size=size, chosen=chosen)
    if policy.actor.use_prefix_grouper and not settings.supports_shared_prefixes:
        yield (
            f"actor_rollout_ref.actor.use_prefix_grouper=true: {chosen} computes every row alone; set "
            "actor_rollout_ref.actor.strategy=fsdp or megatron, or leave it out"
        )
    for key, flags in (("critic", config.critic.fsdp_config), ("actor_rollout_ref.ref", policy.ref.fsdp_config)):
        for field in fields(flags):
            if getattr(flags, field.name) and field.name not in own:
                yield f"{key}.fsdp_config.{field.name}=true: the engine of {chosen} has no offload; leave it out"


def _adapter_problems(model: ModelConfig, settings: EngineSettings, *, key: str, chosen: str) -> Problems:
    """Yield adapters that the engine does not train.

    Args:
        model: Settings of the model.
        settings: Of the engine.
        key: The model's section.
        chosen: The setting that names the engine.
    """
    if model.uses_lora and not settings.supports_lora:
        adapter = model.lora_adapter_path
        what = f"lora_rank={model.lora_rank}" if adapter is None else f"lora_adapter_path={adapter}"
        strategy = chosen.partition("=")[0]
        yield f"{key}.{what}: {chosen} does not train adapters; set {strategy}=fsdp or megatron, or leave it out"


def _size_problems(strategy: str, settings: EngineSettings, *, size: int, chosen: str) -> Problems:
    """Yield a number of processes that an engine of the user's cannot share a model between."""
    if strategy not in SECTIONS and size % settings.model_parallel_size:
        yield (
            f"{chosen}: shares a model between {settings.model_parallel_size} processes, which does not divide the "
            f"{size} processes (trainer.nnodes * trainer.n_gpus_per_node); change one of them"
        )


def critic_engine_problems(config: PPOConfig, *, used: bool) -> Problems:
    """Yield a critic on another engine than the actor's, whose processes it shares.

    fsdp and fsdp2 are the same engine.
    """
    actor, critic = config.actor_rollout_ref.actor.strategy, config.critic.strategy
    if used and ENGINES.address(actor) != ENGINES.address(critic):
        yield f"critic.strategy={critic}: must be the engine of actor_rollout_ref.actor.strategy={actor}"
    elif used:
        try:
            critic_engine_settings(config)
        except ConfigError as error:
            yield str(error)


def token_budget_problems(config: PPOConfig, *, with_critic: bool) -> Problems:
    """Yield budgets below the longest sequence, wherever micro-batches are cut by tokens."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    policy = config.actor_rollout_ref
    positions, key = _positions(policy.model)
    if positions is not None and positions < longest:
        yield (
            f"data.max_response_length={config.data.max_response_length}: with data.max_prompt_length="
            f"{config.data.max_prompt_length} a sequence has {longest} tokens, and {policy.model.path} has {positions} "
            f"positions ({key}); lower one of them"
        )
        return
    with_ref = policy.actor.use_kl_loss or config.algorithm.use_kl_in_reward or config.distillation.enabled
    roles = (  # section, beginning of its settings, whether the role exists, whether it cuts micro-batches by tokens
        ("actor_rollout_ref.actor", "ppo_", True, policy.actor.use_dynamic_bsz),
        ("actor_rollout_ref.rollout", "log_prob_", True, policy.rollout.log_prob_use_dynamic_bsz),
        ("actor_rollout_ref.ref", "log_prob_", with_ref, policy.ref.log_prob_use_dynamic_bsz),
        ("critic", "ppo_", with_critic, config.critic.use_dynamic_bsz),
        ("reward_model", "", config.reward_model.enable, False),
    )
    for section, prefix, exists, dynamic in roles:
        rows = value_at(config, f"{section}.{prefix}micro_batch_size_per_gpu")
        key = f"{section}.{prefix or 'forward_'}max_token_len_per_gpu"
        budget = value_at(config, key)
        if (dynamic or (exists and rows is None)) and budget * sequence_parts(policy.actor) < longest:
            yield (
                f"{key}={budget}: one sequence may have data.max_prompt_length + data.max_response_length = "
                f"{longest} tokens; raise it"
            )


def _positions(model: ModelConfig) -> tuple[int | None, str]:
    """Return the longest sequence that a model reads, and the entry of its config.

    None if its config does not say so, or is not in a directory. Beyond its original positions a model with `longrope`
    computes all rows of a call with other rotations, so that the numbers of a row would depend on its micro-batch.
    """
    key = "max_position_embeddings"
    try:
        with open(os.path.join(model.path or "", "config.json"), encoding="utf-8") as file:
            found = json.load(file) | dict(model.override_config)
    except (OSError, ValueError, TypeError):  # a name of the hub, or damage that the check of the model names
        return None, key
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        key = f"original_{key}"
    limit = rope.get(key) or found.get(key)
    return (limit if isinstance(limit, int) else None), key


def sft_token_budget_problems(config: SupervisedConfig) -> Problems:
    """Yield a token budget below the longest sequence."""
    budget, longest = config.data.max_token_len_per_gpu, config.data.max_length
    by_tokens = config.data.use_dynamic_bsz or config.data.micro_batch_size_per_gpu is None
    if by_tokens and budget * sequence_parts(config) < longest:
        yield (
            f"data.max_token_len_per_gpu={budget}: one sequence may have data.max_length = {longest} tokens; raise it"
        )
