"""Policy losses that bound the update without a clip: SAPO's gate and DRO's quadratic penalty.

Shape letters and results as in `policy_loss.py`; r = exp(logp - old). Nothing is clipped, so `clipped_BT` is False.
Their keyword arguments beside the clip ranges are settings of `actor.policy_loss`.
"""

import torch

from hybridrl.algos.policy_losses.policy_loss import (
    PolicyLoss,
    limited_log_ratio,
    nowhere,
    on_mask,
    register_policy_loss,
)
from hybridrl.algos.row_wise import row_wise
from hybridrl.errors import ConfigError


@register_policy_loss("sapo")
@row_wise
def sapo(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """Soft adaptive policy optimisation, arXiv:2511.20347 equations 6 and 7.

        L = -A (4 / tau) sigmoid(tau (r - 1))        tau = tau_pos where A > 0, else tau_neg

    At r = 1 the gradient is PPO's; it fades on both sides. `OWN_AGG_MODES` sets the paper's seq-mean-token-mean.

    Raises:
        ConfigError: A temperature is not above 0.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if tau <= 0:
            raise ConfigError(f"actor_rollout_ref.actor.policy_loss.{name}={tau} must be above 0")
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    tau_BT = torch.where(advantages_BT > 0, tau_pos, tau_neg).to(log_ratio_BT.dtype)
    losses_BT = -advantages_BT * torch.sigmoid(tau_BT * (log_ratio_BT.exp() - 1)) * 4 / tau_BT
    return _unclipped(losses_BT, log_ratio_BT, response_mask_BT)


@register_policy_loss("dro")
@row_wise
def dro(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    dro_beta: float | None = None,
) -> PolicyLoss:
    """Direct reward optimisation per token, arXiv:2405.19107.

        L = -(A logp - dro_beta / 2 (log r)^2)

    Raises:
        ConfigError: `dro_beta` is not given, or not above 0: without the penalty nothing holds the policy.
    """
    if dro_beta is None or dro_beta <= 0:
        raise ConfigError(f"actor_rollout_ref.actor.policy_loss.dro_beta={dro_beta} must be a number above 0")
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    logp_BT = torch.where(response_mask_BT.bool(), log_probs_BT, 0)
    return _unclipped(-(advantages_BT * logp_BT - dro_beta / 2 * log_ratio_BT**2), log_ratio_BT, response_mask_BT)


def _unclipped(losses_BT: torch.Tensor, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> PolicyLoss:
    nowhere_BT = nowhere(losses_BT)
    return on_mask(losses_BT, nowhere_BT, nowhere_BT, log_ratio_BT, mask_BT)
