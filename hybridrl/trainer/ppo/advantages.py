"""From scores to what is trained on: token rewards with their KL penalty, advantages and returns.

Each function adds columns to a batch. The trainer calls them in the driver. The formulas are in `algos/`. Shapes: B
rows, T response tokens.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridrl.algos.advantages import AdvantageEstimator
from hybridrl.algos.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty
from hybridrl.config.schema.ppo import AlgorithmConfig, KLCtrlConfig
from hybridrl.protocol import DataProto

if TYPE_CHECKING:  # only runs that normalise rewards load it
    from hybridrl.algos.reward_moments import RewardMoments

KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(config: KLCtrlConfig) -> KLController:
    """Return the controller of the KL coefficient in the reward."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


def add_token_rewards(
    batch: DataProto, controller: KLController | None, *, kl_penalty: str, moments: "RewardMoments | None" = None
) -> dict[str, float]:
    """Add `token_level_rewards` (B, T) float32: the scores, minus the KL penalty if there is a controller.

    Updates the controller with the KL to the reference policy. Returns metrics.

    Args:
        batch: Scored rows.
        controller: Of the KL coefficient; None: no penalty.
        kl_penalty: Kind of the KL estimate.
        moments: Scores are normalised by them; None: not.
    """
    columns = batch.batch
    scores_BT, metrics = columns["token_level_scores"], {}
    if moments is not None:
        scores_BT = moments.normalise(scores_BT, columns["response_mask"])
        metrics = {"reward/running_mean": moments.mean, "reward/running_std": moments.std}
    if controller is None:
        columns["token_level_rewards"] = scores_BT
        return metrics
    coef = controller.value
    columns["token_level_rewards"], kl = apply_kl_penalty(
        scores_BT,
        columns["old_log_probs"],
        columns["ref_log_prob"],
        columns["response_mask"],
        coef=coef,
        kind=kl_penalty,
    )
    controller.update(float(kl), len(batch))
    return metrics | {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coef}


def add_advantages(batch: DataProto, estimator: AdvantageEstimator, config: AlgorithmConfig) -> None:
    """Add `advantages` and `returns`, (B, T) float32.

    Rows of one `uid` are a group. Rows of one `episode`, if there is the column, count once in it.
    """
    columns = batch.batch
    _, group_B = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
    squared_BT = columns.get("sum_pi_squared", None)
    columns["advantages"], columns["returns"] = estimator(
        columns["token_level_rewards"],
        columns["response_mask"],
        values_BT=columns.get("values", None),
        group_B=torch.from_numpy(group_B),
        valid_B=columns["reward_valid"],
        gamma=config.gamma,
        lam=config.lam,
        norm_by_std=config.norm_adv_by_std_in_grpo,
        lam_alpha=config.lam_alpha,
        episode_B=columns.get("episode", None),
        baseline_B=columns.get("reward_baselines", None),
        components_BK=columns.get("reward_components", None),
        component_weights=tuple(config.gdpo_reward_weights) or None,
        sum_pi_squared_BT=squared_BT,
        old_log_probs_BT=columns["old_log_probs"] if squared_BT is not None else None,
        is_weights_BT=columns.get("rollout_is_weights", None) if squared_BT is not None else None,
    )
