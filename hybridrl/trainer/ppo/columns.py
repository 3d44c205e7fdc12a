"""The columns of a batch, and the groups that stages read and write.

`RayPPOTrainer.step` refers to these names. With HYBRIDRL_CHECK_STAGES=1 the batch is compared with this table before
and after every stage (`run/column_check.py`). The data set's own columns (`data_source`, ...) pass through unlisted.

Letters of shapes: B rows, one per prompt up to `gen`, one per response from there on, and one per conversation
from `add_branches` on; P tokens of a padded prompt; R tokens of a padded response; T tokens of a sequence, which is the
prompt up to `gen` and P + R from there on; K rewards of a response, or tokens of a teacher; V vocabulary.
"""

from collections.abc import Mapping

from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.trainer.run.middleware import Column

INPUT_IDS, ATTENTION_MASK, POSITION_IDS = "input_ids", "attention_mask", "position_ids"
SEEDS, UID, DATASET_ROW, EPISODE = "seeds", "uid", "dataset_row", UpdatePlan.EPISODE
PROMPTS, RESPONSES, RESPONSE_MASK = "prompts", "responses", "response_mask"
ROLLOUT_LOG_PROBS, NUM_TURNS = "rollout_log_probs", "num_turns"
WEIGHTS_VERSION, TOKEN_VERSIONS = "weights_version", "token_versions"
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
GENERATED = (PROMPTS, *MODEL_INPUT, WEIGHTS_VERSION)
RESPONSE = (PROMPTS, RESPONSES, RESPONSE_MASK)
SCORES = (TOKEN_LEVEL_SCORES, REWARD_VALID)
LOG_PROB_PAIR = (RESPONSE_MASK, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS)
"""What the rollout correction compares."""
ESTIMATES = (TOKEN_LEVEL_REWARDS, ADVANTAGES, RETURNS)
CRITIC_INPUT = (*MODEL_INPUT, VALUES, RETURNS)
"""What the critic is trained on; for the actor see `stages.actor_input`."""

CHOICE = ("filter_groups", "select_samples", "replay", "add_branches")
"""Stages that replace, drop and add rows."""
SAMPLING, SCORING = (("gen", *CHOICE), ("reward", *CHOICE))
"""Stages that write samples, and scores."""

COLUMNS: Mapping[str, Column] = {
    INPUT_IDS: Column("int64", "B T", ("next_batch", *SAMPLING), "tokens, prompts padded on the left"),
    ATTENTION_MASK: Column("int64", "B T", ("next_batch", *SAMPLING), "1 on tokens, 0 on padding"),
    POSITION_IDS: Column("int64", "B T", ("next_batch", *SAMPLING), "position from the first real token on"),
    SEEDS: Column("int64", "B", ("next_batch",), "seed of a prompt's responses; `gen` consumes it"),
    UID: Column("object", "B", ("next_batch",), "id that the samples of one prompt share"),
    DATASET_ROW: Column("object", "B", ("next_batch",), "row of the prompt in the training data"),
    EPISODE: Column("int64", "B", ("add_branches",), "row of the main conversation of the row's agent"),
    PROMPTS: Column("int64", "B P", SAMPLING, "tokens of the prompt, padded on the left"),
    RESPONSES: Column("int64", "B R", SAMPLING, "tokens of the response, padded on the right"),
    RESPONSE_MASK: Column("int64", "B R", SAMPLING, "1 on tokens that the policy sampled"),
    ROLLOUT_LOG_PROBS: Column("float32", "B R", SAMPLING, "log-probs at which the rollout sampled"),
    WEIGHTS_VERSION: Column("int64", "B", SAMPLING, "version of the weights that sampled the first token"),
    TOKEN_VERSIONS: Column("int64", "B R", SAMPLING, "version of the weights of each token, -1 for none"),
    NUM_TURNS: Column("int64", "B", SAMPLING, "agent turns of the response"),
    RM_SCORES: Column("float32", "B R", SCORING, "the reward model's score, on the last token"),
    TOKEN_LEVEL_SCORES: Column("float32", "B R", SCORING, "rewards before any KL penalty"),
    REWARD_VALID: Column(
        "bool", "B", (*SCORING, "reward_baselines"), "whether scoring succeeded; other rows train nothing"
    ),
    REWARD_COMPONENTS: Column("float32", "B K", SCORING, "the rewards of `algorithm.gdpo_reward_keys`"),
    REWARD_BASELINES: Column("float32", "B", ("reward_baselines", *CHOICE), "score of a greedy response (remax)"),
    OLD_LOG_PROBS: Column(
        "float32", "B R", ("old_log_prob", "reuse_log_probs"), "log-probs of the policy to be trained"
    ),
    SUM_PI_SQUARED: Column("float32", "B R", ("old_log_prob",), "sum of squared probabilities of the same policy"),
    ROLLOUT_IS_WEIGHTS: Column("float32", "B R", ("rollout_correction",), "importance weights, 0 off the mask"),
    ROLLOUT_RS_MASK: Column("int64", "B R", ("rollout_correction",), "1 on tokens that rejection leaves in the loss"),
    REF_LOG_PROB: Column("float32", "B R", ("ref", "old_log_prob"), "log-probs of the reference policy"),
    TEACHER_LOG_PROB: Column("float32", "B R", ("teacher",), "log-probs of the row's teacher"),
    TEACHER_TOP_IDS: Column("int32", "B R K", ("teacher",), "the teacher's K likeliest tokens"),
    TEACHER_TOP_LOG_PROBS: Column("float32", "B R K+1", ("teacher",), "their log-probs, last that of all other tokens"),
    TEACHER_ALL_LOG_PROBS: Column("float32", "B R V", ("teacher",), "the teacher's log-probs of every token"),
    VALUES: Column("float32", "B R", ("values",), "the critic's value before each token"),
    TOKEN_LEVEL_REWARDS: Column("float32", "B R", ("adv",), "scores minus the KL penalty, if configured"),
    ADVANTAGES: Column("float32", "B R", ("adv",), "advantages, 0 off the mask"),
    RETURNS: Column("float32", "B R", ("adv",), "targets of the critic"),
}
