"""Scores of responses, and what tells that a run gets none or learns nothing from them.

Each function adds columns to a batch. The trainer calls them in the driver. Scores come from a reward model, a rule, or
a rule that reads the model's score. What becomes of them is in `advantages.py`. Shapes: B rows, T response tokens.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import AGENT_REWARD, LEFT_OUT, at_last_token, model_output, reward_positions
from hybridrl.trainer.ppo.columns import MODEL_INPUT

logger = logging.getLogger(__name__)
RewardFn = Callable[[DataProto], Any]
STEPS_WITHOUT_SIGNAL = 5  # in a row
MAX_UNREWARDED_BATCHES = 3  # in a row: one may be a restart of the reward model, three mean that it is gone


def score_batch(
    batch: DataProto, reward_fn: RewardFn | None, *, reward_model: Any, metrics: dict[str, float]
) -> dict[str, list]:
    """Add `token_level_scores` (B, T) and `reward_valid` (B,) to the batch.

    Args:
        batch: Responses to score.
        reward_fn: Reward function. None: the reward model's scores are the rewards.
        reward_model: Worker group of the reward model, or None.
        metrics: The reward function's metrics are added to it.

    Returns:
        The reward function's extra columns, one value per row.
    """
    if reward_model is not None:
        batch.union(reward_model.compute_rm_score(batch.select(batch_keys=list(MODEL_INPUT), non_tensor_batch_keys=[])))
    out = model_output(batch.batch["rm_scores"]) if reward_fn is None else reward_fn(batch)
    batch.batch["token_level_scores"], batch.batch["reward_valid"] = out.reward_tensor, out.valid
    if reward_fn is not None:
        metrics.update(out.metrics)
    return out.extra


def apply_agent_results(batch: DataProto) -> None:
    """Use the rewards that agents have given themselves, and none of samples whose agent loop has failed.

    Removes both columns, see `rewards.manager`.
    """
    columns, rewards = batch.batch, batch.non_tensor_batch.pop(AGENT_REWARD, None)
    if rewards is not None:
        given_B = torch.tensor([reward is not None for reward in rewards])
        values_B = torch.tensor([0.0 if reward is None else reward for reward in rewards], dtype=torch.float32)
        own_BT = at_last_token(values_B, reward_positions(batch), width=columns["responses"].shape[1])
        columns["token_level_scores"] = torch.where(given_B[:, None], own_BT, columns["token_level_scores"])
        columns["reward_valid"] = columns["reward_valid"] | given_B
    left_out = batch.non_tensor_batch.pop(LEFT_OUT, None)
    if left_out is not None:
        left_B = torch.from_numpy(left_out.astype(bool))
        columns["token_level_scores"] = columns["token_level_scores"].masked_fill(left_B[:, None], 0.0)
        columns["reward_valid"] = columns["reward_valid"] & ~left_B


def check_data_sources(dataset: Any, reward_fn: RewardFn | None) -> None:
    """Refuse data that the reward function cannot score, before a model is loaded.

    Datasets without `data_sources` and reward functions without `check_source` are not checked.

    Raises:
        DataError: Names the first row of a data source without a score function, or without a ground truth for it.
    """
    check = getattr(reward_fn, "check_source", None)
    sources = getattr(dataset, "data_sources", None)
    if check is None or sources is None:
        return
    for source, location in sources().items():
        if (problem := check(source)) is not None:
            raise DataError(f"{location}: {problem}")
        needs = getattr(reward_fn, "needs_ground_truth", None)
        if needs is not None and needs(source) and not getattr(dataset, "has_ground_truths", True):
            raise DataError(
                f"{location}: no row has a ground truth (reward_model.ground_truth), which the reward of "
                f"data_source={source!r} needs; name your column with data.ground_truth_key=COLUMN"
            )


class NoRewardGuard:
    """Stop a run whose samples get no rewards."""

    def __init__(self) -> None:
        self._rewarded = False  # whether any sample had a reward so far
        self._batches_without = 0  # in a row

    def check(self, valid: torch.Tensor) -> None:
        """Check the `reward_valid` column (B,) bool of a batch.

        Raises:
            DataError: No sample of the first batch, or of several batches in a row, got a reward.
        """
        self._rewarded = self._rewarded or bool(valid.any())
        self._batches_without = 0 if bool(valid.any()) else self._batches_without + 1
        if self._batches_without and (not self._rewarded or self._batches_without == MAX_UNREWARDED_BATCHES):
            which = f"the last {self._batches_without} batches of" if self._rewarded else "the first"
            raise DataError(
                f"none of {which} {len(valid)} samples got a reward, so the run stops; the log above has the reasons. "
                "Fix the reward function (custom_reward_function.path), or raise reward_model.timeout_s"
            )


class NoSignalWarning:
    """Warn once if the policy cannot learn from what the last steps have given it."""

    def __init__(self) -> None:
        self._equal_steps = self._cut_steps = 0  # in a row

    def check(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Check the metrics of a step (`metrics.compute_data_metrics`)."""
        equal = metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0
        cut = metrics["response_length/clip_ratio"] == 1
        self._equal_steps = self._equal_steps + 1 if equal else 0
        self._cut_steps = self._cut_steps + 1 if cut else 0
        if self._equal_steps == STEPS_WITHOUT_SIGNAL:
            logger.warning(
                "step %d: all advantages of the last %d steps are 0 (the mean score is %g now): nothing is learned. "
                "Does the reward function tell good answers from bad ones? More samples per prompt "
                "(actor_rollout_ref.rollout.n), easier or harder prompts help if it does",
                step,
                self._equal_steps,
                metrics["critic/score/mean"],
            )
        if self._cut_steps == STEPS_WITHOUT_SIGNAL:
            logger.warning(
                "step %d: every response of the last %d steps was cut at data.max_response_length; raise it, or check "
                "that the model's chat template ends its answers",
                step,
                self._cut_steps,
            )
