"""A run whose rollout has fp8 weights: the policies differ by the rounding, which the rollout correction weighs."""

from hybridrl.config import PPOConfig, load_config
from tests.support.end_to_end.runs import train

DIFFERENCE = "training/rollout_log_probs_diff_mean"


def test_a_rollout_with_fp8_weights_differs_from_the_trainer_by_their_rounding(tmp_path, tiny_qwen2):
    rollout = "actor_rollout_ref__rollout__"
    quiet = {"trainer__test_freq": -1, "trainer__val_before_train": False, "trainer__save_freq": -1}
    corrected = {f"{rollout}quantization": "fp8", "algorithm__rollout_correction__preset": "decoupled_token_is"}
    plain = train(tmp_path / "plain", tiny_qwen2, **quiet)[-1]
    fp8 = train(tmp_path / "fp8", tiny_qwen2, **quiet, **corrected)[-1]
    assert plain[DIFFERENCE] < 1e-5 < 1e-4 < fp8[DIFFERENCE] < 0.1
    assert 0.9 < fp8["rollout_corr/rollout_is_mean"] < 1.1 and fp8["rollout_corr/rollout_is_std"] > 1e-4


def test_the_preset_has_fp8_weights_and_token_level_importance_weights():
    preset = load_config(PPOConfig, ["--config-name=grpo_trainer_fp8"], program="p", config_name="ppo_trainer")
    assert preset.actor_rollout_ref.rollout.quantization == "fp8"
    assert preset.algorithm.rollout_correction.preset == "decoupled_token_is"
    assert (preset.algorithm.adv_estimator, preset.actor_rollout_ref.rollout.n) == ("grpo", 8)
