"""`PolicyWorkers`: the worker groups of the policy, its image processor, and whether its rollout sleeps.

Actor and rollout are placed in one of two ways:

* Hybrid (`Role.ActorRollout`, `Role.ActorRolloutRef`): weights go from engine to rollout inside each process.
* Separated (`Role.Actor` and `Role.Rollout`): rank 0 of the actor sends weights, every rollout process receives them.

A job that only validates a model has `Role.Rollout` alone.

`RayPPOTrainer` calls the groups in the driver. `RolloutPipeline` generates with them, and pushes weights.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.config.engines import engine_settings
from hybridrl.errors import ConfigError
from hybridrl.trainer import ppo
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.workers.engine.hf_model import overrides_for
from hybridrl.workers.images import ImageProcessor, load_processor
from hybridrl.workers.rollout.base import rollout_class

HYBRID = (Role.ActorRolloutRef, Role.ActorRollout)


class PolicyWorkers:
    """Worker groups of actor, rollout and reference.

    Args:
        groups: Role name -> worker group, as `launch` returns them.
        sleep: Whether to free the rollout's device memory during training on the same device.
        trains: Whether the job needs an actor.

    Attributes:
        hybrid: Group of actor and rollout in the same processes; None without one.
        actor, rollout, ref: Groups, some of them the same one; without training there is only `rollout`.
        asleep: Whether the rollout has to wake up before it generates or receives weights.

    Raises:
        ConfigError: A role of the policy is missing.
    """

    def __init__(self, groups: Mapping[str, Any], *, sleep: bool = False, trains: bool = True):
        self.hybrid: Any = next((groups[role] for role in HYBRID if role in groups), None)
        self.actor: Any = self.hybrid or groups.get(Role.Actor)
        self.rollout: Any = groups.get(Role.Rollout) or self.hybrid
        self.ref: Any = groups.get(Role.RefPolicy) or self.actor  # an actor with adapters is its own reference
        self.sleep, self.asleep = sleep, False
        if self.rollout is None or (trains and self.actor is None):
            raise ConfigError(
                "the policy needs Role.ActorRollout, or both Role.Actor and Role.Rollout, in role_worker_mapping"
            )
        if self.rollout is not self.hybrid:
            self.sleep_rollout()  # next to an actor it starts asleep; its first push wakes it

    def sleep_rollout(self) -> None:
        """Free the rollout's device memory until the next generation or push."""
        if self.sleep and not self.asleep:
            self.rollout.rollout_sleep()
            self.asleep = True

    def wake_rollout(self) -> None:
        """Let the rollout have its device memory again."""
        if self.asleep:
            if self.rollout is not self.actor:
                self.actor.free_cached_memory()
            self.rollout.rollout_wake_up()
            self.asleep = False


def make_policy_workers(groups: Mapping[str, Any], manager: ResourcePoolManager, config: PPOConfig) -> PolicyWorkers:
    """Return the `PolicyWorkers` of a job. `groups`: role name -> initialised worker group."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    on_cuda = any(getattr(pool, "use_gpu", False) for pool in manager.resource_pool_dict.values())
    on_cuda |= trainer.backend == "local" and trainer.device != "cpu" and torch.cuda.is_available()
    # With a lag, generation in the same process may not be finished when training begins: do not sleep.
    sleeps = rollout.free_cache_engine and not trainer.rollout_lag and manager.share_a_pool(Role.Actor, Role.Rollout)
    return PolicyWorkers(groups, sleep=on_cuda and sleeps, trains=not config.only_generates)


def image_processor(config: PPOConfig, tokenizer: Any) -> ImageProcessor | None:
    """Return the policy's `ImageProcessor`; None without images, or if the model cannot be read.

    Raises:
        ConfigError: The model reads images, and a setting names what does not run with it, or does not read the same.
    """
    policy = config.actor_rollout_ref
    freezes = "actor_rollout_ref.actor.freeze_vision_tower" if policy.actor.freeze_vision_tower else None
    found = load_processor(policy.model, tokenizer, config.data, freezes=freezes)
    if found is None:
        return None
    for problem in _image_problems(config, found.model_type):
        raise ConfigError(f"{problem}: it does not run with {policy.model.path}, which reads images (docs/images.md)")
    for key, path in _models_of_same_images(config).items():
        own = overrides_for(path, None, policy.model.override_config)
        theirs = load_processor(replace(policy.model, path=path, override_config=own), tokenizer, config.data)
        if theirs is None or theirs.form != found.form:
            raise ConfigError(
                f"{key}={path}: it gets the images as {policy.model.path} reads them ({found.form}), and reads "
                f"{'text only' if theirs is None else theirs.form}; choose a model of the same family"
            )
    return found


def _models_of_same_images(config: PPOConfig) -> dict[str, str]:
    """Return setting -> path of the models that get the policy's patches."""
    teachers = config.distillation.teachers() if config.distillation.enabled else {}
    models = {f"distillation.teacher_models.{key}.model_path": path for key, path in teachers.items()}
    critic = config.critic.model.path if ppo.uses_critic(config) else None
    return models if critic is None else models | {"critic.model.path": critic}


def _image_problems(config: PPOConfig, family: str) -> list[str]:
    policy = config.actor_rollout_ref
    rollout, rewards = policy.rollout.name, "score with a reward function, which gets the images in multi_modal_data"
    problems = {
        f"actor_rollout_ref.actor.strategy={policy.actor.strategy}": not engine_settings(policy.actor).supports_images,
        f"actor_rollout_ref.rollout.name={rollout}": family not in rollout_class(rollout).capabilities.images,
        f"reward_model.enable=true ({rewards})": config.reward_model.enable,
    }
    return [problem for problem, holds in problems.items() if holds]
