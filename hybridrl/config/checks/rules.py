"""What settings mean together: rules that look at more than one key, or at what this machine has.

A rule is a generator of messages; each names key, value and the way out, and a rule that has nothing to say yields
nothing. The lists PPO_RULES and SFT_RULES are the tables. Names of registered plugs come in as arguments, because this
package knows no plug.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.build import raise_for
from hybridrl.config.checks.megatron import layout_problems, local_model_config, model_problems
from hybridrl.config.checks.rollout import Problems, agents, asynchrony, rollout, weight_sync
from hybridrl.config.checks.token_budgets import sft_token_budget, token_budgets
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SFTConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.config.schema.workers import ActorConfig, FSDPConfig, MegatronConfig, ModelConfig
from hybridrl.config.unknown_keys import unknown_name

ENGINE_OF = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
LOGGER_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


def check_config(
    config: PPOConfig,
    *,
    known_estimators: Collection[str],
    group_estimators: Collection[str],
    critic_estimators: Collection[str],
    known_losses: Collection[str],
    own_agg_modes: Mapping[str, str],
    with_inputs: bool = True,
) -> None:
    """Raise one ConfigError with everything in `config` that cannot be right; return nothing when all is well.

    `known_estimators` and `known_losses` are the registered names; `group_estimators` compare the samples of one
    prompt, `critic_estimators` need values, `own_agg_modes` are those of losses that have their own. with_inputs=False:
    data and models need not be given, the job is looked at and not run.
    """
    rules = PPO_RULES if with_inputs else [rule for rule in PPO_RULES if rule not in (data_files, model_paths)]
    problems = [message for rule in rules for message in rule(config)]
    problems += _estimator(config, known=known_estimators, group=group_estimators, critic=critic_estimators)
    problems += _policy_loss(config, known=known_losses, own_agg_modes=own_agg_modes)
    with_critic = (
        config.algorithm.adv_estimator in critic_estimators if config.critic.enable is None else config.critic.enable
    )
    problems += _critic_engine(config, used=with_critic)
    problems += token_budgets(config, with_critic=with_critic)
    raise_for(problems)


def check_sft_config(config: SFTConfig) -> None:
    """Raise one ConfigError with everything in `config` that cannot be right; return nothing when all is well."""
    raise_for([message for rule in SFT_RULES for message in rule(config)])


def data_files(config: PPOConfig | SFTConfig) -> Problems:
    """Training files are given, and every local file is there."""
    if not config.data.train_files:
        yield "data.train_files=[]: nothing to train on; give Parquet files (data_preprocess/ makes them)"
    for key in ("train_files", "val_files"):
        yield from (
            f"data.{key}={path}: there is no such file{_tilde(path)}"
            for path in getattr(config.data, key)
            if _missing(path)
        )


def model_paths(config: PPOConfig) -> Problems:
    """The policy has a model; every path that looks local is there."""
    actor = config.actor_rollout_ref.model
    paths = {
        "actor_rollout_ref.model": actor.path,
        "critic.model": config.critic.model.path,
        "reward_model.model": config.reward_model.model.path,
    }
    yield from _model_problems(paths, needed="actor_rollout_ref.model")


def sft_model_path(config: SFTConfig) -> Problems:
    """There is a model; a path that looks local is there."""
    yield from _model_problems({"model": config.model.path}, needed="model")


def _model_problems(paths: dict[str, str | None], *, needed: str) -> Problems:
    if paths[needed] is None:
        yield f"{needed}.path=null: no model; give a directory or a Hugging Face name"
    for key, path in paths.items():
        looks_local = path and (
            path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
        )  # names on the hub have one slash
        if looks_local and not Path(path).is_dir():
            yield f"{key}.path={path}: there is no such directory{_tilde(path)}"


def engine(config: PPOConfig) -> Problems:
    """The Megatron engine has its library and a layout that its processes and its model allow; the other has no
    settings of it.
    """
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        yield from _megatron(config)
        return
    defaults = MegatronConfig()
    for field in fields(MegatronConfig):
        value = getattr(actor.megatron, field.name)
        if value != getattr(defaults, field.name):
            key = f"actor_rollout_ref.actor.megatron.{field.name}"
            yield f"{key}={value}: has no effect with actor_rollout_ref.actor.strategy={actor.strategy}; leave it out"


def _megatron(config: PPOConfig) -> Problems:
    layout, trainer, key = config.actor_rollout_ref.actor.megatron, config.trainer, "actor_rollout_ref.actor.megatron"
    if find_spec("megatron") is None:
        yield (
            "actor_rollout_ref.actor.strategy=megatron: megatron-core is not installed; pip install "
            "hybridrl[megatron], or use fsdp"
        )
    yield from layout_problems(layout, world_size=trainer.nnodes * trainer.n_gpus_per_node, key=key)
    policy = config.actor_rollout_ref.model
    for path in {policy.path, config.critic.model.path, config.reward_model.model.path} - {None}:
        if (model := local_model_config(path)) is not None:
            model |= dict(policy.override_config) if path == policy.path else {}
            yield from (f"{path}: {problem}" for problem in model_problems(layout, model, key=key))
    offload = config.critic.fsdp_config
    if layout.use_distributed_optimizer and (offload.param_offload or offload.optimizer_offload):
        yield (
            f"critic.fsdp_config: offload is not with {key}.use_distributed_optimizer=true in this release; "
            "set that to false"
        )
    used = config.actor_rollout_ref.actor.fsdp_config
    for field in fields(FSDPConfig):
        value = getattr(used, field.name)
        if value != getattr(FSDPConfig(), field.name):
            name = f"actor_rollout_ref.actor.fsdp_config.{field.name}"
            yield f"{name}={value}: has no effect with actor_rollout_ref.actor.strategy=megatron; leave it out"


def adapters(config: PPOConfig | SFTConfig) -> Problems:
    """Settings of adapters are used, and the engine has them."""
    key, model = (
        ("actor_rollout_ref.model", config.actor_rollout_ref.model)
        if isinstance(config, PPOConfig)
        else ("model", config.model)
    )
    if isinstance(config, PPOConfig) and model.lora_rank and config.actor_rollout_ref.actor.strategy == "megatron":
        yield (
            f"{key}.lora_rank={model.lora_rank}: adapters are with actor_rollout_ref.actor.strategy=fsdp; use "
            f"that, or {key}.lora_rank=0"
        )
    if model.lora_rank and not model.target_modules:
        yield f"{key}.target_modules=[]: no layer would learn; use all-linear, or names such as [q_proj,v_proj]"
    for name in ("lora_alpha", "target_modules"):
        value = getattr(model, name)
        if not model.lora_rank and value != getattr(ModelConfig(), name):
            yield f"{key}.{name}={value}: has no effect without {key}.lora_rank"


def mini_batches(config: PPOConfig) -> Problems:
    """One optimizer step takes no more prompts than a step of training has."""
    prompts = config.data.train_batch_size + config.trainer.replay.groups
    sizes = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        "critic": config.critic.ppo_mini_batch_size,
    }
    for key, size in sizes.items():
        if size is not None and size > prompts:
            yield (
                f"{key}.ppo_mini_batch_size={size}: a step has only {prompts} prompts (data.train_batch_size); "
                f"set {prompts} or less"
            )


def reward(config: PPOConfig) -> Problems:
    """Reward model and length penalty have what they need."""
    model, overlong = config.reward_model, config.reward_model.overlong_buffer
    if model.enable and model.model.path is None:
        yield "reward_model.enable=true: there is no reward model; set reward_model.model.path"
    if not model.enable and model.model.path is not None:
        yield f"reward_model.model.path={model.model.path}: has no effect; set reward_model.enable=true"
    if not overlong.enable:
        return
    if model.reward_manager != "dapo":
        yield (
            "reward_model.overlong_buffer.enable=true: only reward_model.reward_manager=dapo applies it, not "
            f"{model.reward_manager}"
        )
    limit = config.data.max_response_length
    if not 0 < overlong.len <= limit:
        yield f"reward_model.overlong_buffer.len={overlong.len}: must be between 1 and data.max_response_length={limit}"


def dataset_class(config: PPOConfig) -> Problems:
    """A dataset class is named by file and name together."""
    custom = config.data.custom_cls
    if (custom.path is None) != (custom.name is None):
        absent = "path" if custom.path is None else "name"
        yield f"data.custom_cls.{absent}=null: a dataset class needs both data.custom_cls.path and data.custom_cls.name"


def world(config: PPOConfig | SFTConfig) -> Problems:
    """One process is one device."""
    trainer = config.trainer
    size = trainer.nnodes * trainer.n_gpus_per_node
    if trainer.backend != "local":
        return
    if size > 1:
        yield (
            f"trainer.backend=local: runs one process, but trainer.nnodes * trainer.n_gpus_per_node = {size}; "
            "use trainer.backend=ray"
        )
    if trainer.colocate == "device":
        yield "trainer.colocate=device: trainer.backend=local has one process only; use trainer.backend=ray"


def validation(config: PPOConfig | SFTConfig) -> Problems:
    """Whoever asks for validation has validation data."""
    trainer = config.trainer
    if config.data.val_files:
        return
    if trainer.val_only:
        yield "trainer.val_only=true: there is nothing to validate on; set data.val_files"
    if trainer.test_freq > 0:
        yield (
            f"trainer.test_freq={trainer.test_freq}: there is nothing to validate on; set data.val_files, or "
            "trainer.test_freq=-1"
        )


def records(config: PPOConfig | SFTConfig) -> Problems:
    """Frequencies, resume path and loggers fit together."""
    trainer: TrainerConfig = config.trainer
    for key in ("test_freq", "save_freq"):
        if getattr(trainer, key) == 0:
            yield f"trainer.{key}=0: is no frequency; -1 means never"
    if trainer.nonfinite == "rollback" and trainer.save_freq < 0:
        yield "trainer.nonfinite=rollback: there would be no commit to go back to; set trainer.save_freq"
    path, mode = trainer.resume_from_path, trainer.resume_mode
    if mode == "resume_path" and path is None:
        yield (
            "trainer.resume_mode=resume_path: continue from where? set trainer.resume_from_path to a "
            "global_step_N directory"
        )
    if mode != "resume_path" and path is not None:
        yield f"trainer.resume_from_path={path}: is read only with trainer.resume_mode=resume_path, not {mode}"
    if mode == "resume_path" and path is not None and not Path(path).is_dir():
        yield f"trainer.resume_from_path={path}: there is no such directory{_tilde(path)}"
    for logger in trainer.logger:
        package = LOGGER_PACKAGES.get(logger)
        if package and find_spec(package) is None:
            yield f"trainer.logger={logger}: {package} is not installed; in the checkout: pip install -e '.[{package}]'"


def only_in_ppo(config: SFTConfig) -> Problems:
    """Settings of the driver that mean nothing in supervised fine-tuning stay at their defaults."""
    defaults = TrainerConfig()
    names = ("critic_warmup", "val_only", "rollout_data_dir", "validation_data_dir", "colocate")
    for key in (
        *names,
        "overlap",
        "lag",
        "partial_rollout",
        "staleness",
        "stale_tokens",
        "replay",
        "middleware",
        "eval_n_gpus",
    ):
        value = getattr(config.trainer, key)
        if value != getattr(defaults, key):
            yield f"trainer.{key}={value}: has no effect in supervised fine-tuning; leave it out"


def _estimator(
    config: PPOConfig, *, known: Collection[str], group: Collection[str], critic: Collection[str]
) -> Problems:
    name, samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if name not in known:
        yield f"algorithm.adv_estimator={name}: there is no such estimator; {unknown_name(name, known)}"
    if name in group and samples == 1:
        yield (
            f"actor_rollout_ref.rollout.n=1: algorithm.adv_estimator={name} compares the samples of one "
            "prompt, and one sample"
            " has nothing to be compared with; set actor_rollout_ref.rollout.n=2 or more"
        )
    if name in critic and config.critic.enable is False:
        yield (
            f"critic.enable=false: algorithm.adv_estimator={name} needs values; leave critic.enable out, or "
            "take another estimator"
        )


def _policy_loss(config: PPOConfig, *, known: Collection[str], own_agg_modes: Mapping[str, str]) -> Problems:
    name, mode = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.actor_rollout_ref.actor.loss_agg_mode
    if name in own_agg_modes and mode not in (own_agg_modes[name], ActorConfig().loss_agg_mode):
        yield f"actor_rollout_ref.actor.loss_agg_mode={mode}: {name} is always {own_agg_modes[name]}; leave it out"
    if name not in known:
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name}: there is no such loss; {unknown_name(name, known)}"
        )


def _critic_engine(config: PPOConfig, *, used: bool) -> Problems:
    """A critic shares its processes with the actor, so both run on one engine (fsdp and fsdp2 are the same)."""
    actor, critic = config.actor_rollout_ref.actor.strategy, config.critic.strategy
    if used and ENGINE_OF[actor] != ENGINE_OF[critic]:
        yield f"critic.strategy={critic}: must be the engine of actor_rollout_ref.actor.strategy={actor}"


def _missing(path: str) -> bool:
    """Tell whether a local file is not there; addresses such as s3://... are left to their reader."""
    return "://" not in path and not Path(path).exists()


def _tilde(path: str) -> str:
    return " (the shell does not expand ~ after =; write $HOME)" if path.startswith("~") else ""


PPO_RULES: tuple[Callable[[PPOConfig], Problems], ...] = (
    data_files,
    model_paths,
    engine,
    adapters,
    rollout,
    agents,
    weight_sync,
    mini_batches,
    reward,
    dataset_class,
    world,
    asynchrony,
    validation,
    records,
)
SFT_RULES: tuple[Callable[[SFTConfig], Problems], ...] = (
    data_files,
    sft_model_path,
    adapters,
    sft_token_budget,
    world,
    validation,
    records,
    only_in_ppo,
)
