"""Settings of the rollout correction: presets, thresholds, and what is refused before anything starts."""

import pytest

from hybridrl.config import PPOConfig, load_config
from hybridrl.config.checks.rollout_correction import rollout_correction_problems
from hybridrl.config.schema.rollout_correction import (
    PRESETS,
    RejectionBounds,
    RolloutCorrectionConfig,
    correction_plan,
    split_list,
)
from hybridrl.errors import ConfigError

KEY = "algorithm.rollout_correction"


def problems(*words: str) -> str:
    """Return the messages for these settings; a word without a dot is a key of the correction."""
    settings = [word if "." in word.partition("=")[0] else f"{KEY}.{word}" for word in words]
    config = load_config(PPOConfig, settings, program="p", config_name="ppo_trainer")
    return "\n".join(rollout_correction_problems(config))


def plan(**settings):
    return correction_plan(RolloutCorrectionConfig(**settings))


def test_nothing_is_corrected_without_settings():
    nothing = plan()
    assert nothing == plan(preset="disabled")
    assert not (nothing.weighs or nothing.rejects or nothing.bypass_mode)


def test_one_number_truncates_and_two_are_bounds():
    assert (plan(rollout_is="token").is_threshold, plan(rollout_is="token").is_lower) == (2.0, None)
    both = plan(rollout_is="token", rollout_is_threshold="0.5_5.0")
    assert (both.is_lower, both.is_threshold) == (0.5, 5.0)
    assert plan(rollout_is="token", rollout_is_threshold="3").is_threshold == 3.0


def test_thresholds_on_the_command_line_may_be_numbers_or_text():
    words = ["rollout_is=token", "rollout_is_threshold=0.5_5.0", "rollout_rs=[token_k1,seq_mean_k3]"]
    settings = [f"{KEY}.{word}" for word in [*words, "rollout_rs_threshold=[0.5_2.0,0.01]"]]
    config = load_config(PPOConfig, settings, program="p", config_name="ppo_trainer").algorithm.rollout_correction
    assert config.rollout_is_threshold == "0.5_5.0" and config.rollout_rs_threshold == ["0.5_2.0", 0.01]
    found = correction_plan(config)
    assert found.rejections == (RejectionBounds("token_k1", 2.0, 0.5), RejectionBounds("seq_mean_k3", 0.01))
    assert found.weighs and found.rejects


def test_verls_comma_lists_are_read_and_one_threshold_serves_all_kinds():
    assert split_list(["token_k1, seq_mean_k3", "seq_max_k2"]) == ["token_k1", "seq_mean_k3", "seq_max_k2"]
    found = plan(rollout_rs=["token_k1,seq_max_k3"], rollout_rs_threshold=[2.0])
    assert found.rejections == (RejectionBounds("token_k1", 2.0, 0.5), RejectionBounds("seq_max_k3", 2.0))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_free_of_contradictions_and_does_what_its_name_says(name):
    assert problems(f"preset={name}") == ""
    found = plan(preset=name)
    assert found.bypass_mode == name.startswith("bypass")
    assert (found.loss_type == "reinforce") == ("_pg_" in name)
    levels = {"token": ("token_is", "token_tis", "icepop"), "sequence": ("seq_is", "seq_tis", "bypass_pg_is")}
    expected = next((level for level, parts in levels.items() if any(part in name for part in parts)), None)
    assert found.rollout_is == expected
    kinds = {"geo_rs": "seq_mean_k1", "k3_rs": "seq_mean_k3", "is_rs": "seq_sum_k1"}
    assert [r.kind for r in found.rejections] == [kind for part, kind in kinds.items() if part in name]
    assert (found.is_lower is not None) == ("icepop" in name)


def test_there_are_nineteen_presets():
    assert len(PRESETS) == 19


def test_thresholds_may_be_given_beside_a_preset():
    assert plan(preset="decoupled_token_icepop", rollout_is_threshold="0.9_1.1").is_lower == 0.9
    changed = plan(preset="decoupled_k3_rs_seq_tis", rollout_rs_threshold=[0.2], rollout_is_batch_normalize=True)
    assert changed.rejections == (RejectionBounds("seq_mean_k3", 0.2),) and changed.batch_normalize
    assert changed.is_threshold == 2.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout_is=token", "rollout_is_threshold=1_a"],
            f"{KEY}.rollout_is_threshold=1_a: must be one or two numbers",
        ),
        (["rollout_is=token", "rollout_is_threshold=1.0_2.0_3.0"], "must be one or two numbers above 0"),
        (["rollout_is=token", "rollout_is_threshold=-0.5_2.0"], "must be one or two numbers above 0"),
        (["rollout_is=token", "rollout_is_threshold=2.0_0.5"], "the lower bound is above the upper one"),
        (["rollout_is=token", "rollout_is_threshold=0.5_5"], "is below 1, the weight of a sample on policy; write one"),
        (["rollout_is_threshold=3.0"], f"rollout_is_threshold=3: has no effect without {KEY}.rollout_is"),
        (["rollout_is_batch_normalize=true"], f"has no effect without {KEY}.rollout_is"),
        (["rollout_rs=token_k1"], f"rollout_rs_threshold=null: {KEY}.rollout_rs has 1 kinds; give one threshold"),
        (["rollout_rs_threshold=2.0"], f"has no effect without {KEY}.rollout_rs"),
        (["rollout_rs=token_k4", "rollout_rs_threshold=2.0"], "rollout_rs=token_k4: is not known; known are token_k1"),
        (["rollout_rs=[token_k1,token_k1]", "rollout_rs_threshold=2.0"], "names a kind twice"),
        (["rollout_rs=token_k3", "rollout_rs_threshold=0.5_2.0"], "token_k3 is never negative and has an upper bound"),
        (
            ["rollout_rs=[token_k1,token_k2,token_k3]", "rollout_rs_threshold=[1.0,2.0]"],
            "give one threshold, or one for",
        ),
        (
            ["preset=decoupled_token_is", "rollout_is=sequence"],
            f"{KEY}.rollout_is=sequence: {KEY}.preset=decoupled_token_is sets it to token; leave out one of them",
        ),
        (["preset=bypass_pg_is", "bypass_mode=false"], f"{KEY}.preset=bypass_pg_is sets it to true"),
        (["loss_type=reinforce"], f"loss_type=reinforce: has no effect without {KEY}.bypass_mode=true"),
        (["bypass_mode=true", "rollout_is=token"], "has no effect with bypass_mode and loss_type=ppo_clip"),
        (
            ["preset=bypass_pg_is", "rollout_is_batch_normalize=true"],
            "with bypass_mode=true a worker sees only some of the weights",
        ),
        (
            ["bypass_mode=true", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
            "leave out actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        ),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode"], f"needs {KEY}.bypass_mode=true"),
    ],
)
def test_what_contradicts_itself_is_refused_with_key_value_and_fix(words, message):
    assert message in problems(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["bypass_mode=true"],
        ["rollout_is=token"],
        ["rollout_rs=token_k1", "rollout_rs_threshold=2.0"],
        ["preset=bypass_pg_is"],
    ],
)
def test_every_correction_needs_the_rollouts_log_probs(words):
    assert problems(*words) == ""
    without = problems(*words, "actor_rollout_ref.rollout.calculate_log_probs=false")
    assert "set actor_rollout_ref.rollout.calculate_log_probs=true" in without


def test_a_preset_without_a_correction_needs_no_log_probs():
    assert problems("preset=disabled", "actor_rollout_ref.rollout.calculate_log_probs=false") == ""


def test_an_unreadable_plan_raises_what_the_check_reports():
    with pytest.raises(ConfigError, match="rollout_is_threshold=x.*one or two numbers above 0"):
        plan(rollout_is="token", rollout_is_threshold="x")
