"""The policy loss of bypass mode: two policies, the one that sampled and the one that is trained.

Shape letters and results as in `policy_loss.py`. `old_log_probs_BT` are those of the rollout, pi_rollout.
"""

from collections.abc import Sequence

import torch

from hybridrl.algos.policy_losses.clipped import vanilla
from hybridrl.algos.policy_losses.policy_loss import PolicyLoss, limited_log_ratio, register_policy_loss
from hybridrl.algos.policy_losses.weighted import weighted_log_probs
from hybridrl.algos.rollout_correction import Rejection, rejection_mask, rollout_is_weights


@register_policy_loss("bypass_mode")
def bypass_mode(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    is_threshold: float = 2.0,
    is_lower: float | None = None,
    rejections: Sequence[Rejection] = (),
) -> PolicyLoss:
    """Policy loss whose ratio is that of the trained policy to the rollout's: r = exp(logp - rollout).

        ppo_clip:   L = `vanilla` with this ratio; the ratio is the importance weight, and the clip truncates it
        reinforce:  L = -sg[w] A logp        w = `rollout_is_weights` of logp and rollout, 1 without `rollout_is`

    Tokens that `rejection_mask` of logp and rollout leaves out have the loss 0. They are known only after the forward
    pass of this very step, so they stay in the normaliser: the sum over kept tokens is divided by the counts before
    rejection, as in verl. Weights and rejections follow the policy through the optimizer steps of a batch. A row
    decides about itself alone, so the cut into micro-batches changes nothing. `clipped_BT` of reinforce marks the
    tokens whose weight the threshold changed; its clip ranges are unused.

    Raises:
        ValueError: `loss_type` is unknown.
    """
    samples = (log_probs_BT.detach(), old_log_probs_BT, response_mask_BT)
    kept_BT = rejection_mask(*samples, rejections)
    if loss_type == "ppo_clip":
        clip = {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c}
        parts = vanilla(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, **clip)
    elif loss_type == "reinforce":
        parts = _reinforce(
            log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, rollout_is, is_threshold, is_lower
        )
    else:
        raise ValueError(f"loss_type={loss_type!r} is not known; known are ppo_clip, reinforce")
    losses_BT = torch.where(kept_BT, parts.losses_BT, 0)
    return parts._replace(
        losses_BT=losses_BT,
        clipped_BT=parts.clipped_BT & kept_BT,
        clipped_lower_BT=parts.clipped_lower_BT & kept_BT,
        rejected_BT=response_mask_BT.bool() & ~kept_BT,
    )


def _reinforce(
    log_probs_BT: torch.Tensor,
    rollout_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    level: str | None,
    threshold: float,
    lower: float | None,
) -> PolicyLoss:
    log_ratio_BT = limited_log_ratio(log_probs_BT, rollout_log_probs_BT, advantages_BT, mask_BT)
    weight_BT = torch.ones_like(log_ratio_BT)
    limited_BT = torch.zeros_like(log_ratio_BT, dtype=torch.bool)
    if level is not None:
        samples = (log_probs_BT.detach(), rollout_log_probs_BT, mask_BT)
        weight_BT = rollout_is_weights(*samples, level=level, threshold=threshold, lower=lower)
        limited_BT = (weight_BT >= threshold) | (weight_BT == 0)
    return weighted_log_probs(weight_BT, limited_BT, log_probs_BT, advantages_BT, log_ratio_BT, mask_BT)
