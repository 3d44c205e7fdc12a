"""Rules for training engines: settings without effect, what an engine declares that it cannot do, token budgets.

The driver checks them before anything starts. Imports no built-in engine.
"""

from dataclasses import fields
from importlib.util import find_spec

from hybridrl.config import checks
from hybridrl.config.build import Problems, idle_problems
from hybridrl.config.engines import SECTIONS, critic_engine_settings, engine_settings, rank_unit
from hybridrl.config.introspection import value_at
from hybridrl.config.plugs import ENGINES
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.config.schema.workers import MegatronConfig, ModelConfig
from hybridrl.errors import ConfigError


def engine_problems(config: PPOConfig) -> Problems:
    """Yield problems of the actor's engine, and settings of engines that are not used."""
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
    used = SECTIONS.get(actor.strategy)
    idle = [f"{key}.{section}" for section in SECTIONS.values() if section != used]
    if used:
        idle += [f"{key}.engine_config", "critic.engine_config"]
    yield from idle_problems(config, *idle, why=f"with {key}.strategy={actor.strategy}; leave it out")
    if used == "megatron":
        yield from _megatron_problems(config)
    try:
        settings = engine_settings(actor)
    except ConfigError as error:
        yield str(error)
    else:
        yield from _layout_problems(config, settings)


def supervised_engine_problems(config: SupervisedConfig) -> Problems:
    """Yield problems of the engine of a program that trains one model on fixed data."""
    used = SECTIONS[config.strategy]
    idle = [section for section in SECTIONS.values() if section != used]
    yield from idle_problems(config, *idle, why=f"with strategy={config.strategy}; leave it out")
    if used == "megatron":
        layout, trainer = config.megatron, config.trainer
        yield from _installation_problems(prefix="")
        yield from checks.megatron.layout_problems(
            layout, world_size=trainer.nnodes * trainer.n_gpus_per_node, key="megatron"
        )
        yield from _model_problems(config.model, layout, key="megatron", model_key="model")


def _layout_problems(config: PPOConfig, settings: EngineSettings) -> Problems:
    """Yield what the actor's engine cannot do, by its own declarations."""
    policy, size = config.actor_rollout_ref, config.trainer.nnodes * config.trainer.n_gpus_per_node
    chosen = f"actor_rollout_ref.actor.strategy={policy.actor.strategy}"
    own = {field.name for field in fields(settings)}
    if policy.model.uses_lora and not settings.supports_lora:
        adapter = policy.model.lora_adapter_path
        what = f"lora_rank={policy.model.lora_rank}" if adapter is None else f"lora_adapter_path={adapter}"
        yield (
            f"actor_rollout_ref.model.{what}: {chosen} does not train adapters; set "
            "actor_rollout_ref.actor.strategy=fsdp or megatron, or leave it out"
        )
    if policy.actor.use_prefix_grouper and not settings.supports_shared_prefixes:
        yield (
            f"actor_rollout_ref.actor.use_prefix_grouper=true: {chosen} computes every row alone; set "
            "actor_rollout_ref.actor.strategy=fsdp or megatron, or leave it out"
        )
    if policy.actor.strategy not in SECTIONS and size % settings.model_parallel_size:
        yield (
            f"{chosen}: shares a model between {settings.model_parallel_size} processes, which does not divide the "
            f"{size} processes (trainer.nnodes * trainer.n_gpus_per_node); change one of them"
        )
    for key, flags in (("critic", config.critic.fsdp_config), ("actor_rollout_ref.ref", policy.ref.fsdp_config)):
        for field in fields(flags):
            if getattr(flags, field.name) and field.name not in own:
                yield f"{key}.fsdp_config.{field.name}=true: the engine of {chosen} has no offload; leave it out"


def _megatron_problems(config: PPOConfig) -> Problems:
    layout, trainer, key = config.actor_rollout_ref.actor.megatron, config.trainer, "actor_rollout_ref.actor.megatron"
    yield from _installation_problems(prefix="actor_rollout_ref.actor.")
    yield from checks.megatron.layout_problems(layout, world_size=trainer.nnodes * trainer.n_gpus_per_node, key=key)
    policy = config.actor_rollout_ref.model
    yield from _model_problems(policy, layout, key=key, model_key="actor_rollout_ref.model")
    for path in {config.critic.model.path, config.reward_model.model.path} - {None, policy.path}:
        if (model := checks.megatron.local_model_config(path)) is not None:
            yield from (f"{path}: {problem}" for problem in checks.megatron.model_problems(layout, model, key=key))
    offload = config.critic.fsdp_config
    if layout.use_distributed_optimizer and (offload.param_offload or offload.optimizer_offload):
        yield (
            f"critic.fsdp_config: offload is not supported with {key}.use_distributed_optimizer=true in this release; "
            "set that to false"
        )


def _installation_problems(*, prefix: str) -> Problems:
    if find_spec("megatron") is None:
        yield (
            f"{prefix}strategy=megatron: megatron-core is not installed; in the checkout: "
            "pip install -e '.[megatron]', or use fsdp"
        )


def _model_problems(model: ModelConfig, layout: MegatronConfig, *, key: str, model_key: str) -> Problems:
    """Yield why Megatron cannot train a model that is on this machine, or its adapters."""
    if (found := checks.megatron.local_model_config(model.path)) is not None:
        found |= dict(model.override_config)
        yield from (f"{model.path}: {problem}" for problem in checks.megatron.model_problems(layout, found, key=key))
        if model.lora_rank and model.lora_adapter_path is None:
            yield from checks.megatron.adapted_expert_problems(found, model.target_modules, key=model_key)


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


def elastic_problems(config: PPOConfig) -> Problems:
    """Yield why the run could not go on with fewer ranks (`trainer.min_ranks`)."""
    trainer, least = config.trainer, config.trainer.min_ranks
    size, strategy = trainer.nnodes * trainer.n_gpus_per_node, config.actor_rollout_ref.actor.strategy
    if not least:
        return
    key = f"trainer.min_ranks={least}"
    if least > size:
        yield f"{key}: the run has {size} ranks (trainer.nnodes * trainer.n_gpus_per_node); set at most that"
    if trainer.backend == "local":
        yield f"{key}: trainer.backend=local has one process only; use trainer.backend=ray"
    if strategy not in SECTIONS:
        yield (
            f"{key}: actor_rollout_ref.actor.strategy={strategy} is not built in, and its checkpoints may not load "
            "into another number of ranks; use fsdp or megatron, or leave it out"
        )
    elif least % (unit := rank_unit(config)):
        yield (
            f"{key}: {unit} processes share a model (tensor, pipeline, context and expert parallel sizes of engine and "
            f"rollout), so the number of ranks is a multiple of {unit}; set {-(-least // unit) * unit}"
        )
    if trainer.save_freq < 0:
        yield f"{key}: a lost machine takes its snapshots with it; set trainer.save_freq"
    if not trainer.snapshot_freq:
        yield f"{key}: with trainer.snapshot_freq=0 a lost process ends the run; set it to 1 or more"


def token_budget_problems(config: PPOConfig, *, with_critic: bool) -> Problems:
    """Yield budgets below the longest sequence, wherever micro-batches are cut by tokens."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    policy, critic, reward_model = config.actor_rollout_ref, config.critic, config.reward_model
    actor, ref, generation = policy.actor, policy.ref, policy.rollout
    with_ref = actor.use_kl_loss or config.algorithm.use_kl_in_reward or config.distillation.enabled
    log_probs = "log_prob_max_token_len_per_gpu"
    # (key, whether the role exists, whether it cuts micro-batches by tokens, rows per micro-batch)
    roles = [
        (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            True,
            actor.use_dynamic_bsz,
            actor.ppo_micro_batch_size_per_gpu,
        ),
        (
            f"actor_rollout_ref.rollout.{log_probs}",
            True,
            generation.log_prob_use_dynamic_bsz,
            generation.log_prob_micro_batch_size_per_gpu,
        ),
        (
            f"actor_rollout_ref.ref.{log_probs}",
            with_ref,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_micro_batch_size_per_gpu,
        ),
        ("critic.ppo_max_token_len_per_gpu", with_critic, critic.use_dynamic_bsz, critic.ppo_micro_batch_size_per_gpu),
        (
            "reward_model.forward_max_token_len_per_gpu",
            reward_model.enable,
            False,
            reward_model.micro_batch_size_per_gpu,
        ),
    ]
    for key, exists, dynamic, rows in roles:
        budget = value_at(config, key)
        if (dynamic or (exists and rows is None)) and budget < longest:
            yield (
                f"{key}={budget}: one sequence may have data.max_prompt_length + data.max_response_length = "
                f"{longest} tokens; raise it"
            )


def sft_token_budget_problems(config: SupervisedConfig) -> Problems:
    """Yield a token budget below the longest sequence."""
    budget, longest = config.data.max_token_len_per_gpu, config.data.max_length
    by_tokens = config.data.use_dynamic_bsz or config.data.micro_batch_size_per_gpu is None
    if by_tokens and budget < longest:
        yield (
            f"data.max_token_len_per_gpu={budget}: one sequence may have data.max_length = {longest} tokens; raise it"
        )
