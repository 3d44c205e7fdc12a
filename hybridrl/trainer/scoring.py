"""Scores for a batch of responses: from a reward model, a rule, or a rule that reads the model's score."""

from collections.abc import Callable
from typing import Any

import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto

RewardFn = Callable[[DataProto], Any]
UNREWARDED_BATCHES = 3  # in a row: one may be a judge that is restarted, three are a judge that is gone


def score(
    batch: DataProto, reward_fn: RewardFn | None, *, judge: Any, model_input: tuple[str, ...], metrics: dict[str, float]
) -> dict[str, list]:
    """Add `token_level_scores` and `reward_valid` to the batch; return what the reward function added per row.

    judge: the reward model's group, or None; it reads the columns `model_input`. metrics: what the reward function counted is added.
    """
    if judge is not None:
        batch.union(judge.compute_rm_score(batch.select(batch_keys=list(model_input), non_tensor_batch_keys=[])))
    if reward_fn is None:
        scores_BR = batch.batch["rm_scores"]
        valid_B = scores_BR.isfinite().all(-1)
        batch.batch["token_level_scores"], batch.batch["reward_valid"] = torch.where(valid_B[:, None], scores_BR, 0.0), valid_B
        return {}
    out = reward_fn(batch)
    batch.batch["token_level_scores"], batch.batch["reward_valid"] = out.reward_tensor, out.valid
    metrics.update(out.metrics)
    return out.extra


class RewardWatch:
    """Stops a run that learns nothing."""

    def __init__(self) -> None:
        self._rewarded = False  # whether any sample has had a reward yet
        self._batches_without = 0  # in a row

    def look_at(self, valid: torch.Tensor) -> None:
        """Raise DataError if no sample of the first batch got a reward, or none of several batches in a row. valid: (B,) bool."""
        self._rewarded = self._rewarded or bool(valid.any())
        self._batches_without = 0 if bool(valid.any()) else self._batches_without + 1
        if self._batches_without and (not self._rewarded or self._batches_without == UNREWARDED_BATCHES):
            which = f"the last {self._batches_without} batches of" if self._rewarded else "the first"
            raise DataError(
                f"none of {which} {len(valid)} samples got a reward, so nothing can be learnt; the log above names the reasons. "
                "Mend the reward function (custom_reward_function.path), or raise reward_model.timeout_s"
            )
