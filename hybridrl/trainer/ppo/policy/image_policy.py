"""Policies that read images: their image processor, and what does not run with them.

`PPOLoop` calls it in the driver, before anything starts.
"""

from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.engines import engine_settings
from hybridrl.errors import ConfigError
from hybridrl.trainer import data
from hybridrl.trainer.ppo.stages import uses_critic
from hybridrl.workers.engine.hf_model import IMAGE_MODELS, overridden_config, reads_images
from hybridrl.workers.rollout.base import rollout_class


def image_processor(config: PPOConfig, tokenizer: Any) -> Any:
    """Return the policy's `ImageProcessor`; None for a model that reads text only, or that cannot be read.

    Raises:
        ConfigError: The model reads images, and a setting names what does not run with it.
    """
    model = config.actor_rollout_ref.model
    assert model.path is not None
    try:
        found = overridden_config(model.path, dict(model.override_config), trust_remote_code=model.trust_remote_code)
    except ConfigError:  # the workers raise it
        return None
    if not reads_images(found):
        if config.actor_rollout_ref.actor.freeze_vision_tower:
            raise ConfigError(
                f"actor_rollout_ref.actor.freeze_vision_tower=true: {model.path} (model_type={found.model_type}) has "
                f"no vision tower; set it to false, or take a model of {', '.join(IMAGE_MODELS)}"
            )
        return None
    for problem in _problems(config):
        raise ConfigError(f"{problem}: it does not run with {model.path}, which reads images (docs/images.md)")
    return data.ImageProcessor(
        model.path,
        tokenizer,
        options=dict(config.data.mm_processor_kwargs),
        max_images=config.data.max_images_per_prompt,
        token_id=found.image_token_id,
    )


def _problems(config: PPOConfig) -> list[str]:
    policy = config.actor_rollout_ref
    problems = {
        f"actor_rollout_ref.actor.strategy={policy.actor.strategy}": not engine_settings(policy.actor).supports_images,
        f"actor_rollout_ref.rollout.name={policy.rollout.name}": not rollout_class(
            policy.rollout.name
        ).capabilities.images,
        f"algorithm.adv_estimator={config.algorithm.adv_estimator}, which has a critic": uses_critic(config),
        "actor_rollout_ref.model.lora_rank or lora_adapter_path": policy.model.uses_lora,
        "reward_model.enable=true": config.reward_model.enable,
        "distillation.enabled=true": config.distillation.enabled,
    }
    return [problem for problem, holds in problems.items() if holds]


def check_image_data(config: PPOConfig, *datasets: Any) -> None:
    """Raise ConfigError if data have images and agents generate: their requests have tokens only."""
    mode = config.actor_rollout_ref.rollout.mode
    if mode != "sync" and any(getattr(dataset, "has_images", False) for dataset in datasets):
        raise ConfigError(
            f"actor_rollout_ref.rollout.mode={mode}: prompts with images are generated in whole batches; set it to sync"
        )
