"""Policies that read images: their image processor, and what does not run with them.

`PPOLoop` calls it in the driver, before anything starts.
"""

from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.engines import engine_settings
from hybridrl.errors import ConfigError
from hybridrl.workers.images import ImageProcessor, load_processor
from hybridrl.workers.rollout.base import rollout_class


def image_processor(config: PPOConfig, tokenizer: Any) -> ImageProcessor | None:
    """Return the policy's `ImageProcessor`; None for a model that reads text only, or that cannot be read.

    Raises:
        ConfigError: The model reads images, and a setting names what does not run with it.
    """
    policy = config.actor_rollout_ref
    freezes = "actor_rollout_ref.actor.freeze_vision_tower" if policy.actor.freeze_vision_tower else None
    found = load_processor(policy.model, tokenizer, config.data, freezes=freezes)
    for problem in _problems(config, found.model_type) if found is not None else ():
        raise ConfigError(f"{problem}: it does not run with {policy.model.path}, which reads images (docs/images.md)")
    return found


def _problems(config: PPOConfig, family: str) -> list[str]:
    policy = config.actor_rollout_ref
    rollout = policy.rollout.name
    problems = {
        f"actor_rollout_ref.actor.strategy={policy.actor.strategy}": not engine_settings(policy.actor).supports_images,
        f"actor_rollout_ref.rollout.name={rollout}": family not in rollout_class(rollout).capabilities.images,
        "reward_model.enable=true": config.reward_model.enable,
        "distillation.enabled=true": config.distillation.enabled,
    }
    return [problem for problem, holds in problems.items() if holds]
