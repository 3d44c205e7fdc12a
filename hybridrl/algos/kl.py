"""KL to the reference policy: estimators, coefficient controllers, and the penalty in the reward.

Shape letters: B rows, T response tokens. All estimators use the sampled token only, so one number per token suffices.
The KL over the whole vocabulary is not computed here. k1, k2, k3: J. Schulman, "Approximating KL Divergence", 2020,
http://joschu.net/blog/kl-approx.html.
"""

import math
from collections.abc import Callable

import torch

from hybridrl.algos.masked import masked_mean
from hybridrl.algos.shapes import check_same_shape
from hybridrl.errors import CheckpointError, DataError
from hybridrl.registry import Registry

MAX_LOG_RATIO = 20.0
"""Limit of the exponent in k3, so that exp() does not overflow; verl's value."""
MAX_K3 = 10.0
"""Limit of k3 itself, so that one very unlikely token does not dominate the batch; verl's value."""
STRAIGHT_THROUGH = "+"
MAX_RELATIVE_ERROR = 0.2
"""Limit of the adaptive controller's error, arXiv:1909.08593."""


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) per token, of the inputs' shape.

    With d = log_probs - ref_log_probs:

        kl, k1          d                       unbiased, may be negative
        abs             |d|
        mse, k2         d^2 / 2                 biased, small variance, its gradient is that of the KL
        low_var_kl, k3  exp(-d) - 1 + d         unbiased, never negative; -d limited to +-20, the result to 10

    Gradients are those of the formula as written (0 where a limit applies). A kind that ends with "+" is
    straight-through: the value of its formula, and the gradient of k2, which is that of the KL. Not masked.

    Raises:
        ConfigError: The kind is unknown.
        DataError: Shapes differ.
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    difference = log_probs - ref_log_probs
    value = KL_ESTIMATORS.lookup(kind.removesuffix(STRAIGHT_THROUGH))(difference)
    if not kind.endswith(STRAIGHT_THROUGH):
        return value
    gradient = _k2(difference)
    return value.detach() + gradient - gradient.detach()


def apply_kl_penalty(
    token_level_scores: torch.Tensor,
    log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    coef: float,
    kind: str,
) -> tuple[torch.Tensor, float]:
    """Return (token_level_rewards_BT, mean_sequence_kl), all inputs (B, T).

        token_level_rewards = token_level_scores - coef kl        on the mask; unchanged scores off it

    `mean_sequence_kl` is the mean over sequences of the mean over a sequence's tokens, without `coef` (verl's
    `actor/reward_kl_penalty`). Rows without a token are not sequences.

    Raises:
        ConfigError: The kind is unknown.
        DataError: Shapes differ.
    """
    check_same_shape(token_level_scores=token_level_scores, log_probs=log_probs, response_mask=response_mask)
    mask_BT = response_mask.bool()
    kl_BT = kl_penalty(log_probs, ref_log_prob, kind)
    kl_BT = torch.where(mask_BT, kl_BT, 0)
    mean_sequence_kl = masked_mean(masked_mean(kl_BT, mask_BT, dim=1), mask_BT.any(dim=1))
    return token_level_scores - coef * kl_BT, float(mean_sequence_kl)


class FixedKLController:
    """A constant coefficient. It has no state: a resumed run takes it from its settings."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing. A run that was adaptive before continues with the configured coefficient."""


class AdaptiveKLController:
    """A coefficient adapted to a target KL, arXiv:1909.08593, section 2.2.

    e = clip(current_kl / target_kl - 1, -0.2, 0.2)        value <- value (1 + e n_steps / horizon)
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient after `n_steps` samples with mean KL `current_kl`.

        Raises:
            DataError: The KL is not finite.
        """
        if not math.isfinite(current_kl):
            raise DataError(
                f"the KL to the reference policy is {current_kl}: log-probs are not finite, the policy has diverged; "
                "lower the learning rate or raise the KL coefficient"
            )
        error = min(max(current_kl / self.target_kl - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved coefficient.

        Raises:
            CheckpointError: The saved run had a fixed controller and hence no coefficient.
        """
        if "value" not in state:
            raise CheckpointError(
                "the checkpoint has no adaptive KL coefficient; resume with algorithm.kl_ctrl.type=fixed, as it was "
                "written"
            )
        self.value = float(state["value"])


def _k3(difference: torch.Tensor) -> torch.Tensor:
    exponent = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the small results that exp(x) - 1 rounds away; the lower limit removes its last rounding error.
    return (torch.expm1(exponent) - exponent).clamp(0, MAX_K3)


def _k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference**2


Estimator = Callable[[torch.Tensor], torch.Tensor]  # of the difference of log-probs

_BUILT_IN: dict[str, Estimator] = {
    "kl": lambda difference: difference,
    "k1": lambda difference: difference,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_ESTIMATORS: Registry[Estimator] = Registry("kl_penalty", kind="KL estimator", import_paths=False)
KL_ESTIMATORS.update(_BUILT_IN)
