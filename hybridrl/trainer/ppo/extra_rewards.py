"""Rewards beside the score, which only some settings have: length rewards, components and greedy baselines.

`RayPPOTrainer` adds them to a scored batch, in the driver. Shapes: B rows, T response tokens, K components, G greedy
responses.
"""

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hybridrl.algos.length_rewards import length_rewards
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import at_last_token, response_lengths, reward_positions
from hybridrl.rewards.sample_score import as_number

logger = logging.getLogger(__name__)


def add_length_rewards(batch: DataProto, extra: Mapping[str, list], *, coef: float) -> list[float]:
    """Add `coef` times the length reward to the scores, and return it for every row (`algos/length_rewards.py`).

    A response is right if `acc` of the reward function's columns is above 0, or without it if its score is.
    """
    columns = batch.batch
    valid_B, scores_B = columns["reward_valid"].bool(), columns["token_level_scores"].sum(-1)
    right_B = scores_B > 0
    if "acc" in extra:
        right_B = torch.tensor([(as_number(value) or 0.0) > 0 for value in extra["acc"]])
    _, group_B = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
    rewards_B = coef * length_rewards(response_lengths(batch), right_B, valid_B, group_B=torch.from_numpy(group_B))
    width = columns["responses"].shape[1]
    added_BT = at_last_token(rewards_B.float(), reward_positions(batch), width=width)
    columns["token_level_scores"] = columns["token_level_scores"] + added_BT
    return rewards_B.tolist()


def add_reward_components(batch: DataProto, extra: Mapping[str, list], keys: Sequence[str]) -> None:
    """Add `reward_components` (B, K) float32: what the reward function returned under each key.

    "score" is the score itself. A row whose score is valid and that lacks a finite number under a key is marked
    invalid, and logged.

    Raises:
        DataError: No row has a key.
    """
    valid_B = batch.batch["reward_valid"]
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    found: dict[str, list] = {"score": scores, **extra}
    if missing := [key for key in keys if key not in found]:
        raise DataError(
            f"algorithm.gdpo_reward_keys={list(keys)}: the reward function returned no {missing[0]!r}, only "
            f"{', '.join(found)}; let it return a dict with a number under each key, and the total under score"
        )
    numbers = [[as_number(value) for value in found[key]] for key in keys]
    values_BK = torch.tensor([[math.nan if number is None else number for number in row] for row in numbers]).T
    finite_B = values_BK.isfinite().all(1)
    if lost := int((valid_B & ~finite_B).sum()):
        logger.warning("%d of %d samples lack a number under %s; they are left out of the loss", lost, len(batch), keys)
    batch.batch["reward_valid"] = valid_B = valid_B & finite_B
    batch.batch["reward_components"] = torch.where(valid_B[:, None], values_BK, 0.0).float().contiguous()


def add_reward_baselines(batch: DataProto, greedy: DataProto) -> dict[str, float]:
    """Add `reward_baselines` (B,) float32: the score of the greedy response to each row's prompt.

    Rows whose prompt has none, because scoring failed, are marked invalid. Returns metrics of the baselines.

    Args:
        batch: Rows with a `uid`.
        greedy: One scored greedy response for each `uid`.
    """
    valid_G, scores_G = greedy.batch["reward_valid"], greedy.batch["token_level_scores"].sum(-1).float()
    place = {uid: number for number, uid in enumerate(greedy.non_tensor_batch["uid"])}
    index_B = torch.tensor([place[uid] for uid in batch.non_tensor_batch["uid"]], dtype=torch.int64)
    batch.batch["reward_baselines"] = scores_G[index_B]
    batch.batch["reward_valid"] = batch.batch["reward_valid"] & valid_G[index_B]
    lost = float((~valid_G).sum())
    means = {"reward/baseline/mean": float(scores_G[valid_G].mean())} if valid_G.any() else {}
    return {"reward/baseline/num_failed": lost} | means
