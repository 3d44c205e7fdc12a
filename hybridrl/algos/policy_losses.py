"""Policy losses: from log-probs and advantages to one loss per token.

Shape letters: B rows, T response tokens. Losses are 0 off the mask and have the gradient of `log_probs_BT` only.
`aggregate.agg_loss` reduces them to one number. Entropy bonus and KL term are not added here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hybridrl.algos.masked import masked_mean
from hybridrl.algos.shapes import check_same_shape
from hybridrl.errors import ConfigError
from hybridrl.registry import Registry

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8. A larger ratio of one token would overflow half precision and carry no information."""
MAX_LOG_SEQUENCE_RATIO = 10.0
"""Limit of the mean over a whole sequence, where 10 is already far outside any trust region; verl's value."""


class PolicyLoss(NamedTuple):
    """Result of a policy loss: everything (B, T), without gradient except `losses_BT`, 0 or False off the mask.

    Attributes:
        clipped_BT: The clip range determined the loss, so the token has no gradient.
        clipped_lower_BT: The dual-clip bound determined it.
        approx_kl_BT: old log-prob - log-prob, the k1 estimate of KL(old || new).
    """

    losses_BT: torch.Tensor
    clipped_BT: torch.Tensor
    clipped_lower_BT: torch.Tensor
    approx_kl_BT: torch.Tensor


PolicyLossFn = Callable[..., PolicyLoss]
OWN_AGG_MODES = {"gspo": "seq-mean-token-mean"}
"""Losses with the aggregation mode of their paper, which overrides `loss_agg_mode`, as in verl."""
POLICY_LOSSES: Registry[PolicyLossFn] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode", kind="policy loss", plugins="algorithm.path", import_paths=False
)


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register the decorated function as `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    It is called as fn(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, *, clip_low, clip_high, clip_c).
    Every worker runs the files in `algorithm.path`, which may register losses.
    """
    return POLICY_LOSSES.register(name)


def get_policy_loss(name: str) -> PolicyLossFn:
    """Return the loss registered as `name`.

    Raises:
        ConfigError: The name is unknown; the message lists the known names and the nearest.
    """
    return POLICY_LOSSES.lookup(name)


@register_policy_loss("vanilla")
def vanilla(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """PPO's clipped surrogate, arXiv:1707.06347 equation 7, with dual clip, arXiv:1912.09729.

        r = exp(logp - old)        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        for A < 0: min(L, -A clip_c)

    The log ratio is limited to +-20.

    Raises:
        ConfigError: clip_c is not above 1; it would cut off unclipped ratios.
    """
    if clip_c <= 1:
        raise ConfigError(f"actor_rollout_ref.actor.clip_ratio_c={clip_c} must be above 1")
    log_ratio_BT = _log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    losses_BT, clipped_BT = _clipped_surrogate(
        log_ratio_BT.exp(), advantages_BT, clip_low=clip_low, clip_high=clip_high
    )
    bound_BT = -advantages_BT * clip_c
    clipped_lower_BT = (advantages_BT < 0) & (losses_BT > bound_BT)
    losses_BT = torch.where(clipped_lower_BT, bound_BT, losses_BT)
    return _on_mask(losses_BT, clipped_BT, clipped_lower_BT, log_ratio_BT, response_mask_BT)


@register_policy_loss("gspo")
def gspo(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Group sequence policy optimisation in its token form, arXiv:2507.18071 equations 7 and 14.

        s_i = exp(mean_t (logp_t - old_t))        s_it = sg[s_i] exp(logp_t - sg[logp_t])        sg: no gradient
        L = max(-A s_it, -A clip(s_it, 1 - clip_low, 1 + clip_high))

    All tokens of a sequence have the same ratio. Under seq-mean-token-mean their gradients sum to that of s_i. That is
    the paper's objective, and why `OWN_AGG_MODES` sets this mode; other modes weigh sequences by length. Clip ranges
    are those of a whole sequence (the paper's are 3e-4 and 4e-4). There is no dual clip: `clip_c` is unused and
    `clipped_lower_BT` is False.
    """
    log_ratio_BT = _log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    log_sequence_ratio_B1 = masked_mean(log_ratio_BT, response_mask_BT, dim=1)[:, None]
    log_sequence_ratio_BT = log_sequence_ratio_B1.detach() + log_ratio_BT - log_ratio_BT.detach()
    ratio_BT = log_sequence_ratio_BT.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    losses_BT, clipped_BT = _clipped_surrogate(ratio_BT, advantages_BT, clip_low=clip_low, clip_high=clip_high)
    return _on_mask(losses_BT, clipped_BT, torch.zeros_like(clipped_BT), log_ratio_BT, response_mask_BT)


def _log_ratio(
    log_probs_BT: torch.Tensor, old_log_probs_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return logp - old limited to +-20 on the mask and 0 off it.

    Padding thus cannot cause NaN in the backward pass.
    """
    check_same_shape(
        log_probs=log_probs_BT, old_log_probs=old_log_probs_BT, advantages=advantages_BT, response_mask=mask_BT
    )
    difference_BT = log_probs_BT - old_log_probs_BT.detach()
    return torch.where(mask_BT.bool(), difference_BT, torch.zeros_like(difference_BT)).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


def _clipped_surrogate(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) and where the second is larger."""
    plain_BT = -advantages_BT * ratio_BT
    limited_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain_BT, limited_BT), limited_BT > plain_BT


def _on_mask(
    losses_BT: torch.Tensor,
    clipped_BT: torch.Tensor,
    clipped_lower_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> PolicyLoss:
    mask_BT = mask_BT.bool()
    losses_BT = torch.where(mask_BT, losses_BT, torch.zeros_like(losses_BT))
    return PolicyLoss(losses_BT, clipped_BT & mask_BT, clipped_lower_BT & mask_BT, -log_ratio_BT.detach())
