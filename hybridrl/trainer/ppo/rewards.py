"""What every token is worth: rewards with their KL penalty, advantages and returns, from the columns that the stages
before have added.

Shapes: B rows, T response tokens.

Scores for a batch of responses: from a reward model, a rule, or a rule that reads the model's score.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridrl.algos.advantages import AdvantageEstimator
from hybridrl.algos.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty
from hybridrl.config.schema.ppo import AlgorithmConfig, KLCtrlConfig
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto

KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(config: KLCtrlConfig) -> KLController:
    """Return the controller of the KL coefficient in the reward."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


def add_token_rewards(batch: DataProto, controller: KLController | None, *, kl_penalty: str) -> dict[str, float]:
    """Add `token_level_rewards` (B, T) float32: the scores, less the KL to the reference policy where a controller is
    given.

    The controller sees the KL it has caused. Returns the metrics of it.
    """
    columns = batch.batch
    if controller is None:
        columns["token_level_rewards"] = columns["token_level_scores"]
        return {}
    coef = controller.value
    columns["token_level_rewards"], kl = apply_kl_penalty(
        columns["token_level_scores"],
        columns["old_log_probs"],
        columns["ref_log_prob"],
        columns["response_mask"],
        coef=coef,
        kind=kl_penalty,
    )
    controller.update(float(kl), len(batch))
    return {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coef}


def add_advantages(batch: DataProto, estimator: AdvantageEstimator, config: AlgorithmConfig) -> None:
    """Add `advantages` and `returns`, (B, T) float32. Rows of one `uid` are a group."""
    columns = batch.batch
    _, group_B = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
    columns["advantages"], columns["returns"] = estimator(
        columns["token_level_rewards"],
        columns["response_mask"],
        values_BT=columns.get("values", None),
        group_B=torch.from_numpy(group_B),
        valid_B=columns["reward_valid"],
        gamma=config.gamma,
        lam=config.lam,
        norm_by_std=config.norm_adv_by_std_in_grpo,
    )


RewardFn = Callable[[DataProto], Any]
UNREWARDED_BATCHES = 3  # in a row: one may be a judge that is restarted, three are a judge that is gone


def score(
    batch: DataProto, reward_fn: RewardFn | None, *, judge: Any, model_input: tuple[str, ...], metrics: dict[str, float]
) -> dict[str, list]:
    """Add `token_level_scores` and `reward_valid` to the batch; return what the reward function added per row.

    judge: the reward model's group, or None; it reads the columns `model_input`. metrics: what the reward function
    counted is added.
    """
    if judge is not None:
        batch.union(judge.compute_rm_score(batch.select(batch_keys=list(model_input), non_tensor_batch_keys=[])))
    if reward_fn is None:
        scores_BR = batch.batch["rm_scores"]
        valid_B = scores_BR.isfinite().all(-1)
        batch.batch["token_level_scores"], batch.batch["reward_valid"] = (
            torch.where(valid_B[:, None], scores_BR, 0.0),
            valid_B,
        )
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
        """Raise DataError if no sample of the first batch got a reward, or none of several batches in a row.

        valid: (B,) bool.
        """
        self._rewarded = self._rewarded or bool(valid.any())
        self._batches_without = 0 if bool(valid.any()) else self._batches_without + 1
        if self._batches_without and (not self._rewarded or self._batches_without == UNREWARDED_BATCHES):
            which = f"the last {self._batches_without} batches of" if self._rewarded else "the first"
            raise DataError(
                f"none of {which} {len(valid)} samples got a reward, so nothing can be learnt; the log "
                "above names the reasons. "
                "Mend the reward function (custom_reward_function.path), or raise reward_model.timeout_s"
            )
