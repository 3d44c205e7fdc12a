"""Losses of an optimizer step, composed of the formulas in `algos/`.

`EngineWorker` passes them to the engine, in the worker process. A loss is already divided by the counts of the whole
mini-batch over all ranks. So gradients are summed over micro-batches and ranks, and nothing is averaged twice. The same
holds for statistics: their sum over micro-batches and ranks is the value of the mini-batch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hybridrl.algos import rollout_correction
from hybridrl.algos.aggregate import agg_loss, loss_counts
from hybridrl.algos.kl import kl_penalty
from hybridrl.algos.policy_losses import OWN_AGG_MODES, get_policy_loss
from hybridrl.config.schema.distillation import DistillationConfig
from hybridrl.config.schema.rollout_correction import CorrectionPlan
from hybridrl.config.schema.workers import ActorConfig
from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.distillation import divergence_losses
from hybridrl.workers.engine.base import LossFn

NUM_LOSS_TENSORS = 4  # of every policy loss: log-probs, old ones, advantages, mask
REJECTED = "rollout_corr/rollout_rs_masked_fraction"
"""Statistic of a loss that rejects tokens itself: their share of the mini-batch."""


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of a mini-batch over all ranks: response tokens and sequences with at least one of them."""

    num_tokens: float
    num_seqs: float

    @classmethod
    def local(cls, response_mask_BT: torch.Tensor) -> list[float]:
        """Return this rank's share of both counts, to be summed over ranks."""
        return [float(count) for count in loss_counts(response_mask_BT)]


Reduce = Callable[..., torch.Tensor]
"""reduce(values_BT, mode="token-mean") -> the mini-batch's share of a micro-batch, a scalar."""
Terms = tuple[torch.Tensor, dict[str, torch.Tensor]]


def actor_loss(
    config: ActorConfig,
    counts: GlobalCounts,
    *,
    correction: CorrectionPlan | None = None,
    distillation: DistillationConfig | None = None,
) -> LossFn:
    """Return the loss of the policy, a sum of terms that the settings choose.

    The surrogate of the policy gradient; minus an entropy bonus; plus the negative log-likelihood of right responses
    (arXiv:2504.05118, section 4.3); plus the KL to the reference policy; plus the divergence from a teacher. A student
    that only learns from a divergence in the loss has no surrogate.

    Args:
        config: Settings of the actor.
        counts: Sizes of the mini-batch.
        correction: The rollout correction. In bypass mode its loss replaces `policy_loss.loss_mode`.
        distillation: Settings of a teacher.
    """
    teacher = distillation or DistillationConfig()
    surrogate = surrogate_terms(config, correction) if teacher.task_rewards or teacher.in_advantages else None

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> Terms:
        mask_BT = rows.batch["response_mask"].float()

        def reduce(values_BT: torch.Tensor, mode: str = "token-mean") -> torch.Tensor:
            return agg_loss(
                values_BT,
                mask_BT,
                mode,
                num_tokens=counts.num_tokens,
                num_seqs=counts.num_seqs,
                max_len=config.loss_scale_factor or mask_BT.size(-1),
            )

        loss: torch.Tensor = outputs["log_probs"].new_zeros(())
        stats: dict[str, torch.Tensor] = {}
        if surrogate:
            loss, stats = surrogate(outputs, rows, reduce)
        if config.entropy_coeff:
            entropy_loss = reduce(outputs["entropy"], config.loss_agg_mode)
            loss = loss - config.entropy_coeff * entropy_loss
            stats["actor/entropy_loss"] = entropy_loss
        if config.positive_nll_coef:
            nll_loss = reduce(-outputs["log_probs"] * rows.batch["nll_weights"][:, None])
            loss = loss + config.positive_nll_coef * nll_loss
            stats["actor/positive_nll_loss"] = nll_loss
        if config.use_kl_loss:
            kl_BT = kl_penalty(outputs["log_probs"], rows.batch["ref_log_prob"], config.kl_loss_type)
            kl_loss = reduce(kl_BT, config.loss_agg_mode)
            loss = loss + config.kl_loss_coef * kl_loss
            stats["actor/kl_loss"] = kl_loss
        if teacher.in_loss:
            divergence = reduce(divergence_losses(teacher, outputs, rows), config.loss_agg_mode)
            loss = loss + teacher.coefficient * divergence
            stats["distillation/loss"] = divergence
        return loss, stats | {"actor/loss": loss}

    return loss_fn


class OwnLogProbs:
    """Old log-probs of an update that is one optimizer step: those of its own forward pass, without gradient.

    Before the step the trained policy is the old one, so that the ratio of both is 1 and a pass before the update would
    compute the same numbers again. What the pass would return is kept for metrics.

    Args:
        data: This rank's rows, with `batch_row`.
        epochs: Passes of the update over its rows.

    Raises:
        DataError: The update has several optimizer steps; later ones train another policy.
    """

    def __init__(self, data: DataProto, *, epochs: int):
        num_steps = epochs * (UpdatePlan.of(data.meta_info).num_mini_batches or 1)
        if num_steps > 1:
            raise DataError(
                f"the batch has no old_log_probs, and the update has {num_steps} optimizer steps; compute them before "
                "it (actor_rollout_ref.actor.calculate_old_log_probs=true)"
            )
        mask_BR = data.batch["response_mask"]
        none = mask_BR[:0]
        self._parts = [
            {"batch_row": none[:, 0], "response_mask": none, "old_log_probs": none.float(), "entropys": none.float()}
        ]

    def used_by(self, loss_fn: LossFn) -> LossFn:
        """Return the loss with `old_log_probs` in its rows; each call keeps the rows' outputs."""

        def loss_of(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, Mapping[str, Any]]:
            rows.batch["old_log_probs"] = outputs["log_probs"].detach()
            kept = {name: rows.batch[name] for name in ("batch_row", "response_mask", "old_log_probs")}
            self._parts.append(kept | {"entropys": outputs["entropy"].detach()})
            return loss_fn(outputs, rows)

        return loss_of

    def columns(self) -> dict[str, torch.Tensor]:
        """Return `batch_row` (b,) and `response_mask` (b, R) int64, `old_log_probs` and `entropys` (b, R) float32."""
        device = self._parts[-1]["entropys"].device
        return {name: torch.cat([part[name].to(device) for part in self._parts]).cpu() for name in self._parts[0]}


def surrogate_terms(
    config: ActorConfig, correction: CorrectionPlan | None
) -> Callable[[dict[str, torch.Tensor], DataProto, Reduce], Terms]:
    """Return the surrogate of the policy gradient with its statistics, see `actor_loss`."""
    bypass = correction if correction is not None and correction.bypass_mode else None
    mode = "bypass_mode" if bypass else config.policy_loss.loss_mode
    surrogate = get_policy_loss(mode)
    parameters = inspect.signature(surrogate).parameters
    names, takes_all = list(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    clip = {"clip_low": low, "clip_high": high, "clip_c": config.clip_ratio_c}
    settings = asdict(config.policy_loss) | (_bypass_settings(bypass) if bypass else {})
    own_settings = {name: value for name, value in settings.items() if name in names}
    own_settings |= {name: value for name, value in clip.items() if takes_all or name in names}
    own_columns = [name for name in names[NUM_LOSS_TENSORS:] if name.endswith("_BT")]

    def terms(outputs: dict[str, torch.Tensor], rows: DataProto, reduce: Reduce) -> Terms:
        parts = surrogate(
            outputs["log_probs"],
            rows.batch["old_log_probs"],
            rows.batch["advantages"],
            rows.batch["response_mask"].float(),
            **own_settings,
            **{name: _column(rows, name, mode) for name in own_columns},
        )
        loss = reduce(weighted_losses(parts.losses_BT, rows), OWN_AGG_MODES.get(mode, config.loss_agg_mode))
        stats = {
            "actor/pg_loss": loss,
            "actor/pg_clipfrac": reduce(parts.clipped_BT),
            "actor/pg_clipfrac_lower": reduce(parts.clipped_lower_BT),
            "actor/ppo_kl": reduce(parts.approx_kl_BT),
        }
        if bypass and bypass.rejections and parts.rejected_BT is not None:
            stats[REJECTED] = reduce(parts.rejected_BT)
        return loss, stats

    return terms


def _bypass_settings(plan: CorrectionPlan) -> dict[str, Any]:
    """Return the arguments that `bypass_mode` gets from the rollout correction."""
    return {
        "loss_type": plan.loss_type,
        "rollout_is": plan.rollout_is,
        "is_threshold": plan.is_threshold,
        "is_lower": plan.is_lower,
        "rejections": [rollout_correction.Rejection(*bounds) for bounds in plan.rejections],
    }


def _column(rows: DataProto, parameter: str, mode: str) -> torch.Tensor:
    """Return the column that a loss takes as `parameter`, which is its name and `_BT`."""
    name = parameter.removesuffix("_BT")
    if name not in rows.batch.keys():
        raise DataError(f"policy loss {mode} reads the column {name!r}, which the batch lacks; the trainer must add it")
    return rows.batch[name]


def weighted_losses(losses_BT: torch.Tensor, rows: DataProto) -> torch.Tensor:
    """Return the losses (B, R), times the importance weights of the rollout correction if there are any.

    A penalty inside a loss (`dro`, `kl_cov`) is weighted too: it is an expectation over the same samples.
    """
    weights_BT = rows.batch.get("rollout_is_weights", None)
    return losses_BT if weights_BT is None else losses_BT * weights_BT
