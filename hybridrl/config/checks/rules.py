"""Rules over several settings, or over settings and this machine.

Each rule is a generator of error messages, which name key, value and fix. PPO_RULES and SUPERVISED_RULES list them. The
programs call `check_config` and `check_sft_config` in the driver. Names of registered plugins are arguments, because
this package does not import them.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl.config import checks
from hybridrl.config.build import Problems, idle_problems, raise_problems
from hybridrl.config.capabilities import RolloutCapabilities, TransportCapabilities
from hybridrl.config.checks import engines
from hybridrl.config.checks.formulas import estimator_problems, estimator_setting_problems, policy_loss_problems
from hybridrl.config.checks.rollout import capability_problems, rollout_problems
from hybridrl.config.introspection import changed, value_at
from hybridrl.config.plugs import TRACKERS, import_problems
from hybridrl.config.schema.data import HubData
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SFTConfig, SupervisedConfig
from hybridrl.config.schema.trainer import TrainerConfig

ROLLOUT = "actor_rollout_ref.rollout"
ADAPTER_SETTINGS = [
    f"{model}.{name}"
    for model in ("actor_rollout_ref.model", "model")
    for name in ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path")
]
SAMPLING_SETTINGS = (
    *("algorithm.filter_groups", "algorithm.select_samples", "algorithm.use_pf_ppo", "algorithm.pf_ppo"),
    *("data.gen_batch_size", "reward_model.length_reward_coef", "actor_rollout_ref.actor.positive_nll_coef"),
)
AGENT_SETTINGS = [
    f"{ROLLOUT}.{name}"
    for name in ("mode", "agent", "multi_turn", "progress_timeout_s", "endpoint_port", "endpoint_host")
]
AHEAD_SETTINGS = (
    *(f"{ROLLOUT}.n_gpus_per_node", f"{ROLLOUT}.nnodes", "trainer.lag", "trainer.partial_rollout"),
    *("trainer.staleness", "trainer.replay", "trainer.eval_n_gpus"),
)
CORRECTION_SETTINGS = ("algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss.loss_mode")
ROUTING_SETTINGS = ("actor_rollout_ref.actor.router_replay", f"{ROLLOUT}.enable_rollout_routing_replay")
PPO_ONLY = [
    f"trainer.{name}"
    for name in (
        *("critic_warmup", "val_only", "rollout_data_dir", "validation_data_dir", "colocate", "overlap", "lag"),
        *("partial_rollout", "staleness", "stale_tokens", "replay", "middleware", "eval_n_gpus"),
        *("min_ranks", "placement_timeout_s", "record_steps", "record_max_gb"),
        *("parity_limit", "parity_freq"),
    )
]
RECORDED_KINDS = ("first", "last", "nonfinite", "spike", "refused")
PROCESS_SETTINGS = (
    *("trainer.colocate", "trainer.min_ranks", "trainer.eval_n_gpus", f"{ROLLOUT}.n_gpus_per_node"),
    "distillation.n_gpus_per_node",
)
"""Settings of which every other value than the default needs several processes."""
Feature = tuple[Iterable[str], Callable[[Any], Problems]]
"""Settings and sections of a feature, and its rules: they yield nothing if all of these have their defaults."""
LOGGER_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


def check_config(
    config: PPOConfig,
    *,
    known_estimators: Collection[str],
    group_estimators: Collection[str],
    critic_estimators: Collection[str],
    known_losses: Collection[str],
    own_agg_modes: Mapping[str, str],
    rollout: RolloutCapabilities,
    transport: TransportCapabilities | None,
    plug_problems: Iterable[str] = (),
    with_inputs: bool = True,
) -> None:
    """Raise one ConfigError with all contradictions in `config`; return if there are none.

    Args:
        config: The config.
        known_estimators: Registered advantage estimators.
        group_estimators: Those that compare the samples of one prompt.
        critic_estimators: Those that need values.
        known_losses: Registered policy losses.
        own_agg_modes: Loss -> aggregation mode, for losses with a fixed one.
        rollout: What the chosen rollout declares.
        transport: What the chosen transport declares; None if hybridrl chooses it.
        plug_problems: What the chosen rollout refuses itself.
        with_inputs: Whether data, models and packages must be on this machine; False to inspect a job only.
    """
    rules = PPO_RULES if with_inputs else [rule for rule in PPO_RULES if rule not in OF_THIS_MACHINE]
    problems = [message for rule in rules for message in rule(config)]
    problems += [*_feature_problems(config, FEATURES), *capability_problems(config, rollout), *plug_problems]
    if changed(config, f"{ROLLOUT}.weight_sync"):
        problems += checks.weight_sync_problems(config, transport)
    problems += estimator_problems(config, known=known_estimators, group=group_estimators, critic=critic_estimators)
    problems += policy_loss_problems(config, known=known_losses, own_agg_modes=own_agg_modes)
    needs_critic = config.distillation.task_rewards and config.algorithm.adv_estimator in critic_estimators
    with_critic = needs_critic if config.critic.enable is None else config.critic.enable
    problems += engines.critic_engine_problems(config, used=with_critic)
    problems += engines.token_budget_problems(config, with_critic=with_critic)
    raise_problems(problems)


def check_sft_config(config: SFTConfig) -> None:
    """Raise one ConfigError with all contradictions in `config`; return if there are none."""
    raise_problems(supervised_problems(config))


def supervised_problems(config: SupervisedConfig) -> list[str]:
    """Return the problems of a program that trains one model on fixed data, those of its own settings left out."""
    problems = [message for rule in SUPERVISED_RULES for message in rule(config)]
    return [*problems, *_feature_problems(config, [ADAPTERS])]


def _feature_problems(config: PPOConfig | SupervisedConfig, features: Iterable[Feature]) -> Problems:
    """Yield problems of the features that the settings name; the rules of others are not even loaded."""
    for names, rule in features:
        if changed(config, *names):
            yield from rule(config)


def data_file_problems(config: PPOConfig | SupervisedConfig) -> Problems:
    """Yield missing training files, and local files that do not exist."""
    if not config.data.train_files and not config.trainer.val_only:
        yield "data.train_files=[]: no training data; give parquet or .jsonl files (data_preprocess/ creates them)"
    for key in ("train_files", "val_files"):
        yield from missing_files(key, getattr(config.data, key))


def missing_files(key: str, paths: Sequence[str]) -> Problems:
    """Yield files of the setting `data.key` that do not exist; URLs such as s3://... are not checked."""
    for path in paths:
        if "://" not in path and not Path(path).exists() and HubData.named(path) is None:
            yield f"data.{key}={path}: there is no such file{_tilde_hint(path)}"


def model_path_problems(config: PPOConfig) -> Problems:
    """Yield a missing policy model, and paths that look local and do not exist."""
    actor = config.actor_rollout_ref.model
    paths = {
        "actor_rollout_ref.model": actor.path,
        "critic.model": config.critic.model.path,
        "reward_model.model": config.reward_model.model.path,
    }
    if config.distillation.enabled:
        entries = {**config.distillation.teacher_models}
        paths |= {
            f"distillation.teacher_models.{name}": entry["model_path"]
            for name, entry in entries.items()
            if isinstance(entry, Mapping) and isinstance(entry.get("model_path"), str)
        }
    yield from _path_problems(paths, needed="actor_rollout_ref.model")


def trained_model_path_problems(config: SupervisedConfig) -> Problems:
    """Yield a missing model, or a path that looks local and does not exist."""
    yield from _path_problems({"model": config.model.path}, needed="model")


def _path_problems(paths: dict[str, str | None], *, needed: str) -> Problems:
    if paths[needed] is None:
        yield f"{needed}.path=null: no model; give a directory, a Hugging Face name or a GGUF file"
    for key, path in paths.items():
        if path and _looks_local(path) and not Path(path).is_dir():
            name = "model_path" if key.startswith("distillation") else "path"
            if Path(path).is_file():
                yield f"{key}.{name}={path}: is a file; a model is a directory, or a file that ends in .gguf"
            else:
                yield f"{key}.{name}={path}: there is no such directory{_tilde_hint(path)}"


def _looks_local(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1  # hub names have at most one slash


def mini_batch_problems(config: PPOConfig) -> Problems:
    """Yield mini-batches with more prompts than a step has."""
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


def dataset_class_problems(config: PPOConfig) -> Problems:
    """Yield dataset or sampler classes of which only the path or only the name is given."""
    for what, section, prefix in (("dataset class", "custom_cls", ""), ("sampler", "sampler", "class_")):
        keys = [f"data.{section}.{prefix}{name}" for name in ("path", "name")]
        absent = [key for key in keys if value_at(config, key) is None]
        if len(absent) == 1:
            yield f"{absent[0]}=null: a {what} needs both {' and '.join(keys)}"


def world_size_problems(config: PPOConfig | SupervisedConfig) -> Problems:
    """Yield more than one process with trainer.backend=local."""
    trainer = config.trainer
    size = trainer.nnodes * trainer.n_gpus_per_node
    if trainer.backend != "local":
        return
    if size > 1:
        yield (
            f"trainer.backend=local: runs one process, but trainer.nnodes * trainer.n_gpus_per_node = {size}; "
            "use trainer.backend=ray"
        )
    for key, value in changed(config, *PROCESS_SETTINGS).items():
        yield f"{key}={value}: trainer.backend=local has one process only; use trainer.backend=ray, or leave it out"


def validation_problems(config: PPOConfig | SupervisedConfig) -> Problems:
    """Yield validation settings without validation data."""
    trainer = config.trainer
    if config.data.val_files:
        return
    if trainer.val_only:
        yield "trainer.val_only=true: there is no validation data; set data.val_files"
    if trainer.test_freq > 0:
        yield (
            f"trainer.test_freq={trainer.test_freq}: there is no validation data; set data.val_files, or "
            "trainer.test_freq=-1"
        )


def parity_problems(config: PPOConfig) -> Problems:
    """Yield a limit of log-prob differences that is neither a number above 0 nor one of two words."""
    limit = config.trainer.parity_limit
    if limit not in ("auto", "off") and not (isinstance(limit, float) and limit > 0):
        yield f"trainer.parity_limit={limit}: must be auto, off, or a number above 0"


def record_problems(config: PPOConfig | SupervisedConfig) -> Problems:
    """Yield contradictions of frequencies, resume path and loggers."""
    trainer: TrainerConfig = config.trainer
    for key in ("test_freq", "save_freq"):
        if getattr(trainer, key) == 0:
            yield f"trainer.{key}=0: is not a frequency; -1 means never"
    if trainer.nonfinite == "rollback" and trainer.save_freq < 0:
        yield "trainer.nonfinite=rollback: there would be no checkpoint to roll back to; set trainer.save_freq"
    yield from _run_name_problems(trainer)
    for kind in trainer.record_steps or ():
        if kind not in RECORDED_KINDS and not (kind.isdecimal() and int(kind)):
            yield f"trainer.record_steps={kind}: must be the number of a step, or one of {', '.join(RECORDED_KINDS)}"
    path, mode = trainer.resume_from_path, trainer.resume_mode
    if mode == "resume_path" and path is None:
        yield (
            "trainer.resume_mode=resume_path: has no path; set trainer.resume_from_path to a global_step_N directory"
        )
    if mode != "resume_path" and path is not None:
        yield f"trainer.resume_from_path={path}: is read only with trainer.resume_mode=resume_path, not {mode}"
    if mode == "resume_path" and path is not None and not Path(path).is_dir():
        yield f"trainer.resume_from_path={path}: there is no such directory{_tilde_hint(path)}"
    yield from import_problems(TRACKERS, trainer.logger)


def package_problems(config: PPOConfig | SupervisedConfig) -> Problems:
    """Yield loggers and engines whose package this machine lacks."""
    for logger in config.trainer.logger:
        package = LOGGER_PACKAGES.get(logger)
        if package and find_spec(package) is None:
            yield f"trainer.logger={logger}: {package} is not installed; in the checkout: pip install -e '.[{package}]'"
    engine = config.actor_rollout_ref.actor if isinstance(config, PPOConfig) else config
    if engine.strategy == "megatron" and find_spec("megatron") is None:
        key = "actor_rollout_ref.actor.strategy" if isinstance(config, PPOConfig) else "strategy"
        install = "pip install -e '.[megatron]'"
        yield f"{key}=megatron: megatron-core is not installed; in the checkout: {install}, or use fsdp"


def _run_name_problems(trainer: TrainerConfig) -> Problems:
    for key in ("project_name", "experiment_name"):
        name = getattr(trainer, key)
        if os.path.isabs(name) or os.pardir in Path(name).parts:
            yield f"trainer.{key}={name}: leaves checkpoints/; for another directory set trainer.default_local_dir"


def ppo_only_problems(config: SupervisedConfig) -> Problems:
    """Yield driver settings that have an effect in main_ppo only."""
    yield from idle_problems(config, *PPO_ONLY, why="here, only in main_ppo; leave it out")


def _tilde_hint(path: str) -> str:
    return " (the shell does not expand ~ after =; write $HOME)" if path.startswith("~") else ""


PPO_RULES: tuple[Callable[[PPOConfig], Problems], ...] = (
    data_file_problems,
    model_path_problems,
    engines.engine_problems,
    rollout_problems,
    mini_batch_problems,
    dataset_class_problems,
    world_size_problems,
    validation_problems,
    record_problems,
    parity_problems,
    package_problems,
    estimator_setting_problems,
)
OF_THIS_MACHINE = (data_file_problems, model_path_problems, package_problems)
ADAPTERS: Feature = (ADAPTER_SETTINGS, lambda config: checks.adapter_problems(config))
FEATURES: tuple[Feature, ...] = (
    ADAPTERS,
    (SAMPLING_SETTINGS, lambda config: checks.sampling_problems(config)),
    (AGENT_SETTINGS, lambda config: checks.agent_problems(config)),
    (AHEAD_SETTINGS, lambda config: checks.ahead_problems(config)),
    (["trainer.min_ranks"], lambda config: checks.elastic_problems(config)),
    (CORRECTION_SETTINGS, lambda config: checks.rollout_correction_problems(config)),
    (ROUTING_SETTINGS, engines.routing_problems),
    (["reward_model"], lambda config: checks.reward_problems(config)),
    (["distillation"], lambda config: checks.distillation_problems(config)),
)
SUPERVISED_RULES: tuple[Callable[[SupervisedConfig], Problems], ...] = (
    data_file_problems,
    trained_model_path_problems,
    engines.supervised_engine_problems,
    engines.sft_token_budget_problems,
    world_size_problems,
    validation_problems,
    record_problems,
    package_problems,
    ppo_only_problems,
)
