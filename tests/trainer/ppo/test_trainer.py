"""The list of a step's stages, for settings that change what a stage promises."""

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.load import compose_settings
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.roles import Role


@pytest.mark.parametrize(
    ("settings", "is_repeatable"),
    [
        ({}, True),
        ({"trainer.lag": 1}, False),
        ({"trainer.lag": 1, "trainer.staleness": 0}, True),  # nothing may be ahead, so nothing is
        ({"trainer.lag": 2, "trainer.staleness": 1}, False),
        ({"trainer.lag": 2, "trainer.staleness": 0, "trainer.stale_tokens": "drop"}, False),
    ],
)
def test_generation_can_be_repeated_if_it_is_not_ahead(settings, is_repeatable):
    files = {"data.train_files": "x", "actor_rollout_ref.model.path": "x", "algorithm.adv_estimator": "grpo"}
    config = compose_settings(PPOConfig, files | settings, config_name="ppo_trainer")
    stages = {stage.spec.name: stage for stage in RayPPOTrainer.step(config, {Role.ActorRollout})}
    assert stages["gen"].pure is is_repeatable
