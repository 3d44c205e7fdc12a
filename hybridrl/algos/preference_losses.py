"""Preference losses: from the scores of preferred and rejected responses to one loss per comparison.

Shape letters: N pairs, B rows (responses), T response tokens. `sequence_scores` turns token log-probs into the score
s (B,) that a loss compares, by what the loss declares:

    reference, sum     s = sum_t log pi(y_t) - log pi_ref(y_t)              DPO, KTO
    reference, mean    the same sum / |y|                                   IPO
    sum, mean          s = sum_t log pi(y_t), or that sum / |y|             ORPO and SimPO: mean

beta * s is the implicit reward of every loss here. sigma is the logistic function; sg: no gradient. The losses are not
reduced: the caller divides their sum by the number of comparisons of the whole batch.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from hybridrl.algos.masked import masked_sum
from hybridrl.algos.shapes import check_same_shape
from hybridrl.registry import Registry

MIN_NEGATIVE_LOG_PROB = 1e-6
"""Smallest -log P in the odds of ORPO. At P = 1 the odds are infinite."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered loss and what it compares.

    Attributes:
        fn: fn(chosen_N, rejected_N, *, beta, ...) -> losses (N,). Unpaired: fn(scores_B, desirable_B,
            baseline_B, *, beta, ...) -> losses (B,). Further keyword arguments are settings of section `loss`.
        needs_reference: Scores are relative to the reference policy.
        is_mean: Scores are divided by the number of tokens.
        is_paired: A comparison is a pair; else one response with a label.
    """

    fn: Callable[..., torch.Tensor]
    needs_reference: bool = True
    is_mean: bool = False
    is_paired: bool = True

    @property
    def settings(self) -> frozenset[str]:
        """Names of the settings that the loss reads."""
        parameters = inspect.signature(self.fn).parameters.values()
        return frozenset(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry(
    "loss.loss_type", kind="preference loss", plugins="model.external_lib", import_paths=False
)


def register_preference_loss(
    name: str, *, needs_reference: bool = True, is_mean: bool = False, is_paired: bool = True
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Register the decorated formula as `loss.loss_type=name`; the arguments are those of `PreferenceLoss`."""

    def enter(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        PREFERENCE_LOSSES.enter(name, PreferenceLoss(fn, needs_reference, is_mean, is_paired))
        return fn

    return enter


def sequence_scores(log_probs_BT: torch.Tensor, mask_BT: torch.Tensor, *, is_mean: bool = False) -> torch.Tensor:
    """Return the sum (B,) of the log-probs on the mask, or their mean; 0 for an empty row."""
    total_B = masked_sum(log_probs_BT, mask_BT, dim=1)
    return total_B / mask_BT.bool().sum(1).clamp(min=1) if is_mean else total_B


@register_preference_loss("dpo")
def dpo(chosen_N: torch.Tensor, rejected_N: torch.Tensor, *, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Direct preference optimization, arXiv:2305.18290 equation 7; with label smoothing cDPO.

        h = beta (s_chosen - s_rejected)
        L = -(1 - eps) log sigma(h) - eps log sigma(-h)

    eps is the share of swapped labels (Mitchell, "A note on DPO with noisy preferences"). h is then pulled to
    log((1 - eps) / eps) and no further. Equal scores give log 2.
    """
    check_same_shape(chosen=chosen_N, rejected=rejected_N)
    h_N = beta * (chosen_N - rejected_N)
    return -(1 - label_smoothing) * logsigmoid(h_N) - label_smoothing * logsigmoid(-h_N)


@register_preference_loss("ipo", is_mean=True)
def ipo(chosen_N: torch.Tensor, rejected_N: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Identity preference optimization, arXiv:2310.12036 equation 17.

        L = (s_chosen - s_rejected - 1 / (2 beta))^2

    beta is the paper's tau. The paper has sums of log-probs; this has means over tokens, as TRL does on the advice of
    the authors, so that the target does not depend on lengths. Unlike DPO the margin is not pushed to infinity.
    """
    check_same_shape(chosen=chosen_N, rejected=rejected_N)
    return (chosen_N - rejected_N - 1 / (2 * beta)) ** 2


@register_preference_loss("orpo", needs_reference=False, is_mean=True)
def orpo(chosen_N: torch.Tensor, rejected_N: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Odds-ratio preference optimization, arXiv:2403.07691 equations 6 and 7; no reference policy.

        log odds(y) = s - log(1 - exp(s))             s: mean log-prob, P = exp(s)
        L = -s_chosen - beta log sigma(log odds(chosen) - log odds(rejected))

    beta is the paper's lambda. The first term is the likelihood of each chosen response, averaged over its own tokens
    as in the paper. TRL averages it over all tokens of the batch, prompts included.
    """
    check_same_shape(chosen=chosen_N, rejected=rejected_N)
    return -chosen_N - beta * logsigmoid(_log_odds(chosen_N) - _log_odds(rejected_N))


@register_preference_loss("simpo", needs_reference=False, is_mean=True)
def simpo(chosen_N: torch.Tensor, rejected_N: torch.Tensor, *, beta: float, simpo_gamma: float) -> torch.Tensor:
    """Simple preference optimization, arXiv:2405.14734 equation 6; no reference policy.

        L = -log sigma(beta (s_chosen - s_rejected) - gamma)

    With gamma = 0 it is DPO on mean log-probs under a uniform reference. The paper uses beta of 2 to 10.
    """
    check_same_shape(chosen=chosen_N, rejected=rejected_N)
    return -logsigmoid(beta * (chosen_N - rejected_N) - simpo_gamma)


@register_preference_loss("kto", is_paired=False)
def kto(
    scores_B: torch.Tensor,
    desirable_B: torch.Tensor,
    baseline_B: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Kahneman-Tversky optimization, arXiv:2402.01306 equation 8; labels instead of pairs.

        L = w_D (1 - sigma(beta (s - z)))      desirable
        L = w_U (1 - sigma(beta (z - s)))      undesirable

    z is `kto_baseline`, without gradient. The paper's constant lambda_y, which no gradient sees, is left out: the loss
    is lambda_y - v of the paper. Equal policies give w / 2.
    """
    check_same_shape(scores=scores_B, desirable=desirable_B, baseline=baseline_B)
    gain_B = beta * (scores_B - baseline_B.detach())
    is_desirable_B = desirable_B.bool()
    sign_B = torch.where(is_desirable_B, 1.0, -1.0)
    weight_B = torch.where(is_desirable_B, desirable_weight, undesirable_weight)
    return weight_B * torch.sigmoid(-sign_B * gain_B)  # 1 - sigma(x) = sigma(-x), without cancellation


def kto_baseline(mismatched_scores_B: torch.Tensor) -> float:
    """Return z of KTO: the estimate max(0, mean s) of KL(policy || reference), arXiv:2402.01306 section 4.1.

    The scores are those of mismatched rows of the whole batch: each prompt with the response of another one.
    """
    return max(0.0, float(mismatched_scores_B.double().mean())) if len(mismatched_scores_B) else 0.0


def bradley_terry(
    chosen_N: torch.Tensor, rejected_N: torch.Tensor, margins_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss (N,) of a reward model, with margins of arXiv:2307.09288 equation 2 if given.

        L = -log sigma(r_chosen - r_rejected - m)

    r are the model's scores. The model of Bradley and Terry (1952): P(chosen wins) = sigma(r_chosen - r_rejected).
    """
    check_same_shape(chosen=chosen_N, rejected=rejected_N)
    if margins_N is None:
        return -logsigmoid(chosen_N - rejected_N)
    check_same_shape(chosen=chosen_N, margins=margins_N)
    return -logsigmoid(chosen_N - rejected_N - margins_N)


def _log_odds(mean_log_probs_N: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) of P = exp(mean log-prob)."""
    s_N = mean_log_probs_N.clamp(max=-MIN_NEGATIVE_LOG_PROB)
    return s_N - torch.log(-torch.expm1(s_N))
