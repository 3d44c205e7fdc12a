"""Rules on the rollout correction, for `rules.py`: presets, thresholds, bypass mode, what it needs."""

from dataclasses import fields

from hybridrl.config.build import Problems
from hybridrl.config.introspection import value_text
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.rollout_correction import (
    KEY,
    PRESETS,
    THRESHOLDS,
    CorrectionPlan,
    RolloutCorrectionConfig,
    correction_plan,
)
from hybridrl.errors import ConfigError

BYPASS_LOSS = "bypass_mode"
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"


def rollout_correction_problems(config: PPOConfig) -> Problems:
    """Yield settings of the correction that contradict each other, cannot be read, or lack the rollout's log-probs."""
    correction = config.algorithm.rollout_correction
    yield from _preset_problems(correction)
    try:
        plan = correction_plan(correction)
    except ConfigError as error:
        yield str(error)
        return
    yield from _idle_settings(correction, plan)
    yield from _bypass_problems(config, plan)
    corrects = plan.rollout_is or plan.rejections or plan.bypass_mode
    if corrects and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield (
            f"{_cause(correction, plan)}: needs the rollout's log-probs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )


def _cause(correction: RolloutCorrectionConfig, plan: CorrectionPlan) -> str:
    """Return the setting that turned the correction on, as it was written."""
    if correction.preset:
        return f"{KEY}.preset={correction.preset}"
    if plan.bypass_mode:
        return f"{KEY}.bypass_mode=true"
    name = "rollout_is" if plan.rollout_is else "rollout_rs"
    return f"{KEY}.{name}={value_text(getattr(correction, name))}"


def _preset_problems(correction: RolloutCorrectionConfig) -> Problems:
    if correction.preset is None:
        return
    free = ("preset", "rollout_is_batch_normalize", *THRESHOLDS)
    for name in (field.name for field in fields(correction) if field.name not in free):
        value = getattr(correction, name)
        if value is not None:
            own = value_text(PRESETS[correction.preset].get(name))
            yield (
                f"{KEY}.{name}={value_text(value)}: {KEY}.preset={correction.preset} sets it to {own}; leave out "
                "one of them"
            )


def _idle_settings(correction: RolloutCorrectionConfig, plan: CorrectionPlan) -> Problems:
    for name in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        value = getattr(correction, name)
        if value and not plan.rollout_is:
            yield f"{KEY}.{name}={value_text(value)}: has no effect without {KEY}.rollout_is"
    if correction.loss_type and not plan.bypass_mode:
        yield f"{KEY}.loss_type={correction.loss_type}: has no effect without {KEY}.bypass_mode=true"


def _bypass_problems(config: PPOConfig, plan: CorrectionPlan) -> Problems:
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not plan.bypass_mode:
        if loss == BYPASS_LOSS:
            yield f"{LOSS_KEY}={loss}: needs {KEY}.bypass_mode=true, and is its loss then; set it and leave this out"
        return
    if loss not in ("vanilla", BYPASS_LOSS):
        yield f"{KEY}.bypass_mode=true: its loss is {KEY}.loss_type={plan.loss_type}; leave out {LOSS_KEY}={loss}"
    if plan.rollout_is and plan.loss_type == "ppo_clip":
        yield (
            f"{KEY}.rollout_is={plan.rollout_is}: has no effect with bypass_mode and loss_type=ppo_clip, whose ratio "
            "is already the weight; leave it out, or set loss_type=reinforce"
        )
    if plan.batch_normalize:
        yield (
            f"{KEY}.rollout_is_batch_normalize=true: with bypass_mode=true a worker sees only some of the weights of a "
            "batch at a time; leave it out"
        )
