"""Policy losses: from log-probs and advantages to one loss per token.

Shape letters: B rows, T response tokens. Losses are 0 off the mask and have the gradient of `log_probs_BT` only.
`aggregate.agg_loss` reduces them to one number. Entropy bonus and KL term are not added here.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch

from hybridrl.algos.row_wise import is_one_value
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
        rejected_BT: The loss itself rejected the token, which has no gradient and stays in the normaliser. None:
            nothing is rejected.
    """

    losses_BT: torch.Tensor
    clipped_BT: torch.Tensor
    clipped_lower_BT: torch.Tensor
    approx_kl_BT: torch.Tensor
    rejected_BT: torch.Tensor | None = None


SIGNATURE = (
    "log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, *, clip_low=0.2, clip_high=0.2, clip_c=3.0, **_"
)
PolicyLossFn = Callable[..., PolicyLoss]
OWN_AGG_MODES = dict.fromkeys(("gspo", "geo_mean", "sapo"), "seq-mean-token-mean")
"""Losses with the aggregation mode of their paper, which overrides `loss_agg_mode`, as in verl."""
POLICY_LOSSES: Registry[PolicyLossFn] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    kind="policy loss",
    builtins={
        name: f"hybridrl.algos.policy_losses.{module}:{name}"
        for module, names in {
            "clipped": ("vanilla", "gspo", "geo_mean"),
            "weighted": ("gpg", "cispo", "topr", "dppo_tv", "dppo_kl"),
            "smooth": ("sapo", "dro"),
            "covariance": ("clip_cov", "kl_cov"),
            "bypass": ("bypass_mode",),
        }.items()
        for name in names
    },
    plugins="algorithm.path",
    import_paths=False,
)


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register the decorated function as `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    It is called as fn(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, ...), further with those of
    `clip_low`, `clip_high`, `clip_c` and the settings of `actor.policy_loss` that its signature names. A further
    parameter `x_BT` gets the column `x` of the batch, which the trainer must add.
    Every worker runs the files in `algorithm.path`, which may register losses.

    Raises:
        ConfigError: The name is taken, or the function has the signature of verl's policy losses.
    """

    def enter(fn: PolicyLossFn) -> PolicyLossFn:
        _refuse_order_of_verl(str(getattr(name, "value", name)), fn)
        return POLICY_LOSSES.register(name)(fn)

    return enter


def _refuse_order_of_verl(name: str, fn: PolicyLossFn) -> None:
    """Raise ConfigError for a loss that takes the old log-probs first: it would train the wrong ones, silently.

    verl's losses are not adapted. They return one number for a micro-batch, and here the trainer divides by the counts
    of the whole mini-batch.
    """
    names = list(inspect.signature(fn).parameters)
    if len(names) > 1 and "old" in names[0] and "old" not in names[1]:
        raise ConfigError(
            f"the policy loss {name!r} takes ({', '.join(names[:2])}, ...), as in verl. Here the new log-probs come "
            "first, and the result has the loss of each token. Change it to\n"
            f"    def {getattr(fn, '__name__', name)}({SIGNATURE}) -> PolicyLoss:\n"
            "without config and loss_agg_mode; docs/extending.md has an example"
        )


def get_policy_loss(name: str) -> PolicyLossFn:
    """Return the loss registered as `name`.

    Raises:
        ConfigError: The name is unknown; the message lists the known names and the nearest.
    """
    return POLICY_LOSSES.lookup(name)


def limited_log_ratio(
    log_probs_BT: torch.Tensor, old_log_probs_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return logp - old limited to +-20 on the mask and 0 off it.

    Padding thus cannot cause NaN in the backward pass.
    """
    check_same_shape(
        log_probs=log_probs_BT, old_log_probs=old_log_probs_BT, advantages=advantages_BT, response_mask=mask_BT
    )
    difference_BT = log_probs_BT - old_log_probs_BT.detach()
    return torch.where(mask_BT.bool(), difference_BT, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def on_mask(
    losses_BT: torch.Tensor,
    clipped_BT: torch.Tensor,
    clipped_lower_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> PolicyLoss:
    """Return the result of a loss from its parts (B, T), with 0 and False off the mask."""
    mask_BT = mask_BT.bool()
    losses_BT = torch.where(mask_BT, losses_BT, 0)
    approx_kl_BT, rejected_BT = -log_ratio_BT.detach(), nowhere(mask_BT)
    clipped_BT, clipped_lower_BT = (
        flags_BT if is_one_value(flags_BT) else flags_BT & mask_BT for flags_BT in (clipped_BT, clipped_lower_BT)
    )
    return PolicyLoss(losses_BT, clipped_BT, clipped_lower_BT, approx_kl_BT, rejected_BT)


def nowhere(like_BT: torch.Tensor) -> torch.Tensor:
    """Return False for every token (B, T), as one value in memory: not to be written to."""
    return torch.zeros((), dtype=torch.bool, device=like_BT.device).expand(like_BT.shape)
