"""The columns of a batch: one table of what each is, which stages write it, and with which settings it exists.

`RayPPOTrainer.step` declares for each stage all columns that it may use; `columns_in_use` leaves those of the run.
With HYBRIDRL_CHECK_STAGES=1 the batch is compared with this table before and after every stage
(`run/column_check.py`). The data set's own columns (`data_source`, ...) pass through unlisted.

Letters of shapes: B rows, one per prompt up to `gen`, one per response from there on, and one per conversation
from `add_branches` on; P tokens of a padded prompt; R tokens of a padded response; T tokens of a sequence, which is the
prompt up to `gen` and P + R from there on; K rewards of a response, or tokens of a teacher; V vocabulary.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.schema.rollout_correction import correction_plan
from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.framework.stage import Stage
from hybridrl.trainer.data.prompt_loader import ROW
from hybridrl.trainer.ppo.step_settings import (
    StepSettings,
    compares_log_probs,
    has_old_log_probs,
    has_reward_model,
    max_token_age,
    scores_reference_with_actor,
    teacher_gives,
    trains_branches,
    uses_agents,
    uses_components,
    uses_critic,
    uses_greedy_baseline,
    uses_reference,
    uses_sum_pi_squared,
)
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run.middleware import Column, Condition

INPUT_IDS, ATTENTION_MASK, POSITION_IDS = "input_ids", "attention_mask", "position_ids"
SEEDS, UID, DATASET_ROW, EPISODE = "seeds", "uid", ROW, UpdatePlan.EPISODE
PROMPTS, RESPONSES, RESPONSE_MASK = "prompts", "responses", "response_mask"
ROLLOUT_LOG_PROBS, NUM_TURNS = "rollout_log_probs", "num_turns"
WEIGHTS_VERSION, TOKEN_VERSIONS, ROUTED_EXPERTS = "weights_version", "token_versions", "routed_experts"
RM_SCORES, TOKEN_LEVEL_SCORES, REWARD_VALID = "rm_scores", "token_level_scores", "reward_valid"
REWARD_COMPONENTS, REWARD_BASELINES, SUM_PI_SQUARED = "reward_components", "reward_baselines", "sum_pi_squared"
OLD_LOG_PROBS, REF_LOG_PROB = "old_log_probs", "ref_log_prob"
ROLLOUT_IS_WEIGHTS, ROLLOUT_RS_MASK = "rollout_is_weights", "rollout_rs_mask"
TEACHER_LOG_PROB, TEACHER_ALL_LOG_PROBS = "teacher_log_prob", "teacher_all_log_probs"
TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS = "teacher_top_ids", "teacher_top_log_probs"
VALUES, TOKEN_LEVEL_REWARDS, ADVANTAGES, RETURNS = "values", "token_level_rewards", "advantages", "returns"

PROMPT_INPUT = (INPUT_IDS, ATTENTION_MASK, POSITION_IDS, SEEDS)
MODEL_INPUT = (INPUT_IDS, ATTENTION_MASK, POSITION_IDS, RESPONSES, RESPONSE_MASK)
"""What a model reads. All other columns of a batch stay in the driver."""
RESPONSE = (PROMPTS, RESPONSES, RESPONSE_MASK)
SAMPLES = (PROMPTS, *MODEL_INPUT, ROLLOUT_LOG_PROBS, WEIGHTS_VERSION, TOKEN_VERSIONS, NUM_TURNS)
SCORES = (TOKEN_LEVEL_SCORES, REWARD_VALID)
REWARDED = (RM_SCORES, *SCORES, REWARD_COMPONENTS)
BASELINES = (REWARD_VALID, REWARD_BASELINES)
STORED = (*SAMPLES, *REWARDED, REWARD_BASELINES)
"""What belongs to a sample before anything is computed with the policy."""
ROWS = (*STORED, EPISODE)
SCORED_INPUT = (*MODEL_INPUT, ROLLOUT_LOG_PROBS)
ACTOR_SCORES = (OLD_LOG_PROBS, SUM_PI_SQUARED, REF_LOG_PROB)
LOG_PROB_PAIR = (RESPONSE_MASK, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS)
CORRECTION = (ROLLOUT_IS_WEIGHTS, ROLLOUT_RS_MASK)
TEACHER = (TEACHER_LOG_PROB, TEACHER_ALL_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS)
JUDGED = (
    *(RESPONSE_MASK, *SCORES, EPISODE, VALUES, REWARD_COMPONENTS, REWARD_BASELINES),
    *(OLD_LOG_PROBS, REF_LOG_PROB, TEACHER_LOG_PROB, SUM_PI_SQUARED, ROLLOUT_IS_WEIGHTS),
)
"""What advantages are computed from."""
ESTIMATES = (TOKEN_LEVEL_REWARDS, ADVANTAGES, RETURNS)
CRITIC_INPUT = (*MODEL_INPUT, VALUES, RETURNS)
ACTOR_INPUT = (*MODEL_INPUT, ADVANTAGES, *CORRECTION, REF_LOG_PROB, *TEACHER)
"""What the actor gets of its rows, besides `old_log_probs` if the batch has them."""
ROW_CHOICE = (REWARD_VALID, EPISODE, WEIGHTS_VERSION, TOKEN_VERSIONS, TOKEN_LEVEL_SCORES)
"""What decides which rows and tokens an update gets."""
FOR_CRITIC, FOR_ACTOR = ((*ROW_CHOICE, *CRITIC_INPUT), (*ROW_CHOICE, *ACTOR_INPUT, OLD_LOG_PROBS))

CHOICE = ("filter_groups", "select_samples", "replay", "add_branches")
"""Stages that replace, drop and add rows."""
SAMPLING, SCORING = (("gen", *CHOICE), ("reward", *CHOICE))
"""Stages that write samples, and scores."""
OLD, REF = ("old_log_prob", "reuse_log_probs"), ("ref", "old_log_prob")
CORRECT, TEACH = ("rollout_correction",), ("teacher",)


def by(condition: Callable[[PPOConfig], Any]) -> Condition:
    """Return a condition on the settings alone."""
    return lambda s: bool(condition(s.config))


# -- When a column exists.
LOG_PROBS = by(lambda config: config.actor_rollout_ref.rollout.calculate_log_probs)
PARTIAL, AGENTS = by(lambda config: config.trainer.partial_rollout), by(uses_agents)
CRITIC, REFERENCE, EPISODES = by(uses_critic), by(uses_reference), by(trains_branches)
COMPONENTS, GREEDY, SQUARES = by(uses_components), by(uses_greedy_baseline), by(uses_sum_pi_squared)
WEIGHS = by(lambda config: correction_plan(config.algorithm.rollout_correction).weighs)
REJECTS = by(lambda config: correction_plan(config.algorithm.rollout_correction).rejects)
REPLAYS = by(lambda config: config.actor_rollout_ref.actor.router_replay.mode != "disabled")
TAUGHT = by(lambda config: config.distillation.enabled)
TOP, WHOLE = by(lambda config: teacher_gives(config) == "top"), by(lambda config: teacher_gives(config) == "all")

# -- Where it is read or written only with some settings.
STALE = dict.fromkeys(("update_critic", "update_actor"), by(lambda config: max_token_age(config) is not None))
BY_SCORE = {
    "update_critic": by(lambda config: config.algorithm.use_pf_ppo),
    "update_actor": by(lambda config: config.algorithm.use_pf_ppo or config.actor_rollout_ref.actor.positive_nll_coef),
}
TO_COMPARE = {"adv": by(compares_log_probs)}
AS_REFERENCE = {
    "old_log_prob": scores_reference_with_actor,
    "adv": by(lambda config: config.algorithm.use_kl_in_reward),
    "update_actor": by(lambda config: config.actor_rollout_ref.actor.use_kl_loss),
}
IN_LOSS = {"update_actor": by(lambda config: config.distillation.in_loss)}
SAMPLED_IN_LOSS = {
    "update_actor": by(lambda config: config.distillation.in_loss and teacher_gives(config) == "sampled")
}

COLUMNS: Mapping[str, Column] = {
    INPUT_IDS: Column("int64", "B T", ("next_batch", *SAMPLING), "tokens, prompts padded on the left"),
    ATTENTION_MASK: Column("int64", "B T", ("next_batch", *SAMPLING), "1 on tokens, 0 on padding"),
    POSITION_IDS: Column("int64", "B T", ("next_batch", *SAMPLING), "position from the first real token on"),
    SEEDS: Column("int64", "B", ("next_batch",), "seed of a prompt's responses; `gen` consumes it"),
    UID: Column("object", "B", ("next_batch",), "id that the samples of one prompt share"),
    DATASET_ROW: Column("object", "B", ("next_batch",), "row of the prompt in the training data"),
    EPISODE: Column("int64", "B", ("add_branches",), "row of the agent's main conversation", EPISODES),
    PROMPTS: Column("int64", "B P", SAMPLING, "tokens of the prompt, padded on the left"),
    RESPONSES: Column("int64", "B R", SAMPLING, "tokens of the response, padded on the right"),
    RESPONSE_MASK: Column("int64", "B R", SAMPLING, "1 on tokens that the policy sampled"),
    ROLLOUT_LOG_PROBS: Column("float32", "B R", SAMPLING, "log-probs at which the rollout sampled", LOG_PROBS),
    WEIGHTS_VERSION: Column("int64", "B", SAMPLING, "of the weights that sampled the first token", only=STALE),
    TOKEN_VERSIONS: Column("int64", "B R", SAMPLING, "the same of each token, -1 for none", PARTIAL, STALE),
    ROUTED_EXPERTS: Column(
        "object",
        "B",
        (*SAMPLING, "old_log_prob"),
        "experts of the tokens, N x layers x K (R2: `old_log_prob`)",
        REPLAYS,
    ),
    NUM_TURNS: Column("int64", "B", SAMPLING, "agent turns of the response", AGENTS),
    RM_SCORES: Column("float32", "B R", SCORING, "the reward model's score, on the last token", has_reward_model),
    TOKEN_LEVEL_SCORES: Column("float32", "B R", SCORING, "rewards before any KL penalty", only=BY_SCORE),
    REWARD_VALID: Column(
        "bool", "B", (*SCORING, "reward_baselines"), "whether scoring succeeded; others train nothing"
    ),
    REWARD_COMPONENTS: Column("float32", "B K", SCORING, "the rewards of `algorithm.gdpo_reward_keys`", COMPONENTS),
    REWARD_BASELINES: Column("float32", "B", ("reward_baselines", *CHOICE), "score of a greedy response", GREEDY),
    OLD_LOG_PROBS: Column(
        "float32", "B R", OLD, "log-probs of the policy to be trained", has_old_log_probs, TO_COMPARE
    ),
    SUM_PI_SQUARED: Column("float32", "B R", ("old_log_prob",), "sum of its squared probabilities", SQUARES),
    ROLLOUT_IS_WEIGHTS: Column(
        "float32", "B R", CORRECT, "importance weights, 0 off the mask", WEIGHS, {"adv": SQUARES}
    ),
    ROLLOUT_RS_MASK: Column("int64", "B R", CORRECT, "1 on tokens that rejection leaves in the loss", REJECTS),
    REF_LOG_PROB: Column("float32", "B R", REF, "log-probs of the reference policy", REFERENCE, AS_REFERENCE),
    TEACHER_LOG_PROB: Column("float32", "B R", TEACH, "log-probs of the row's teacher", TAUGHT, SAMPLED_IN_LOSS),
    TEACHER_TOP_IDS: Column("int32", "B R K", TEACH, "the teacher's K likeliest tokens", TOP, IN_LOSS),
    TEACHER_TOP_LOG_PROBS: Column("float32", "B R K+1", TEACH, "theirs, last that of all other tokens", TOP, IN_LOSS),
    TEACHER_ALL_LOG_PROBS: Column("float32", "B R V", TEACH, "the teacher's log-probs of every token", WHOLE, IN_LOSS),
    VALUES: Column("float32", "B R", ("values",), "the critic's value before each token", CRITIC),
    TOKEN_LEVEL_REWARDS: Column("float32", "B R", ("adv",), "scores minus the KL penalty, if configured"),
    ADVANTAGES: Column("float32", "B R", ("adv",), "advantages, 0 off the mask"),
    RETURNS: Column("float32", "B R", ("adv",), "targets of the critic"),
}


StepFn = Callable[[Any, PPOConfig, Collection[Role]], list[Stage]]


def columns_in_use(step: StepFn) -> StepFn:
    """Decorate a `step`: its stages are returned with those of their columns that a run with these settings has."""

    @functools.wraps(step)
    def with_columns_in_use(trainer: Any, config: PPOConfig, roles: Collection[Role]) -> list[Stage]:
        settings = StepSettings(config, roles, trainer)
        return [
            replace(
                stage,
                reads=used_columns(stage.reads, settings, stage=stage.spec.name),
                writes=used_columns(stage.writes, settings, stage=stage.spec.name),
            )
            for stage in step(trainer, config, roles)
        ]

    return with_columns_in_use


def used_columns(names: Iterable[str], settings: StepSettings, *, stage: str) -> tuple[str, ...]:
    """Return the columns in `names` that the stage uses with these settings."""
    return tuple(name for name in names if COLUMNS[name].is_used(stage, settings))
