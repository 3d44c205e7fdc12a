"""What every token is worth: rewards with their KL penalty, advantages and returns, from the columns that the stages before have added.

Shapes: B rows, T response tokens.
"""

import numpy as np
import torch

from hybridrl.algos.advantages import AdvantageEstimator
from hybridrl.algos.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty
from hybridrl.config.ppo import AlgorithmConfig, KLCtrlConfig
from hybridrl.protocol import DataProto

KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(config: KLCtrlConfig) -> KLController:
    """Return the controller of the KL coefficient in the reward."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


def add_token_rewards(batch: DataProto, controller: KLController | None, *, kl_penalty: str) -> dict[str, float]:
    """Add `token_level_rewards` (B, T) float32: the scores, less the KL to the reference policy where a controller is given.

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
