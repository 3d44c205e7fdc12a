"""Rules for distillation: which teachers there are, and what the divergence needs.

The driver checks them before anything starts.
"""

import logging
from collections.abc import Mapping
from typing import Any

from hybridrl.config.build import Problems, idle_problems
from hybridrl.config.engines import engine_settings
from hybridrl.config.introspection import value_text
from hybridrl.config.schema.distillation import OTHER_TEACHER_FIELDS, TEACHER_FIELDS, TOP_MODES
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.errors import ConfigError

logger = logging.getLogger(__name__)


def distillation_problems(config: PPOConfig) -> Problems:
    """Yield problems of teachers, divergence and their processes, and settings without effect."""
    chosen = config.distillation
    if not chosen.enabled:
        yield from idle_problems(config, "distillation", why="without distillation.enabled=true")
        return
    yield from _teacher_problems(chosen.teacher_models)
    yield from _loss_problems(config)
    yield from _engine_problems(config)
    if not chosen.task_rewards:
        yield from _reward_problems(config)


def _teacher_problems(entries: dict) -> Problems:
    if not entries:
        yield (
            "distillation.teacher_models={}: distillation.enabled=true has no teacher; set "
            "distillation.teacher_models.teacher_model.model_path"
        )
    keys: dict[str, str] = {}
    for name, entry in entries.items():
        where = f"distillation.teacher_models.{name}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("model_path"), str):
            yield f"{where}={value_text(entry)}: has no model; set {where}.model_path"
            continue
        known = (*TEACHER_FIELDS, *OTHER_TEACHER_FIELDS)
        for other in entry.keys() - {*known}:
            yield f"{where}.{other}: there is no such entry; a teacher has {' and '.join(TEACHER_FIELDS)}"
        if len(entries) > 1 and not entry.get("key"):
            yield f"{where}.key: is missing; it is the value of distillation.teacher_key in the rows of this teacher"
        key = str(entry.get("key") or name)
        if key in keys:
            yield f"{where}.key={key}: is that of {keys[key]} too; every teacher needs its own"
        keys[key] = name
        _log_unused_entries(where, entry)


def _log_unused_entries(where: str, entry: Mapping[str, Any]) -> None:
    if unused := [name for name in OTHER_TEACHER_FIELDS if name in entry]:
        logger.info(
            "%s: %s changes nothing here: teachers run in the training engine, on all processes of their pool",
            where,
            " and ".join(unused),
        )


def _loss_problems(config: PPOConfig) -> Problems:
    loss, key = config.distillation.distillation_loss, "distillation.distillation_loss"
    distribution = loss.loss_mode.startswith(("forward", "reverse"))
    if loss.use_policy_gradient and distribution:
        yield (
            f"{key}.loss_mode={loss.loss_mode}: compares distributions, and {key}.use_policy_gradient=true has the "
            f"gradient of the sampled token alone; set {key}.use_policy_gradient=false, or loss_mode=k1"
        )
    if not loss.use_policy_gradient and loss.loss_mode in ("kl", "k1"):
        yield (
            f"{key}.loss_mode={loss.loss_mode}: its gradient does not depend on the teacher, so it is no loss; use k2 "
            f"or a distribution, or {key}.use_policy_gradient=true"
        )
    with_mode = f"with loss_mode={loss.loss_mode}"
    if loss.loss_mode not in TOP_MODES:
        yield from idle_problems(config, f"{key}.topk", why=f"{with_mode}; use {' or '.join(TOP_MODES)}")
    if not distribution:
        yield from idle_problems(config, f"{key}.log_prob_min_clamp", why=with_mode)
    if not loss.use_task_rewards:
        why = "with use_task_rewards=false, where the divergence is all that is trained on"
        yield from idle_problems(config, f"{key}.distillation_loss_coef", why=why)


def _engine_problems(config: PPOConfig) -> Problems:
    chosen, strategy = config.distillation, config.actor_rollout_ref.actor.strategy
    try:
        settings = engine_settings(config.actor_rollout_ref.actor)
    except ConfigError:
        return  # engine_problems reports it
    if chosen.in_loss and not chosen.samples_only and not settings.supports_token_terms:
        yield (
            f"distillation.distillation_loss.loss_mode={chosen.distillation_loss.loss_mode}: needs the log-probs of "
            f"more than the sampled token, which actor_rollout_ref.actor.strategy={strategy} does not compute; use "
            "loss_mode=k2 or k3, or strategy=fsdp"
        )
    size = chosen.n_gpus_per_node * chosen.nnodes
    if size % settings.model_parallel_size:
        yield (
            f"distillation.n_gpus_per_node={chosen.n_gpus_per_node}: the teachers' pool has {size} processes, and a "
            f"model is shared between {settings.model_parallel_size}; make it a multiple"
        )
    if not chosen.n_gpus_per_node:
        yield from idle_problems(config, "distillation.nnodes", why="without distillation.n_gpus_per_node")


def _reward_problems(config: PPOConfig) -> Problems:
    why = "distillation.distillation_loss.use_task_rewards=false trains on no rewards"
    if config.critic.enable:
        yield f"critic.enable=true: {why}, and a critic needs them; leave it out"
    if config.algorithm.use_kl_in_reward:
        yield f"algorithm.use_kl_in_reward=true: {why}; use actor_rollout_ref.actor.use_kl_loss"
    if config.reward_model.enable:
        yield f"reward_model.enable=true: {why}; leave it out"
    if config.algorithm.filter_groups.enable:
        yield f"algorithm.filter_groups.enable=true: {why}, and groups are filtered by them; leave it out"
    if config.data.sampler.class_path is not None:
        chosen = config.data.sampler.class_path
        yield f"data.sampler.class_path={chosen}: {why}, and a sampler is shown them; leave it out"
