"""Losses of an optimizer step, composed of the formulas in `algos/`.

`EngineWorker` passes them to the engine, in the worker process. A loss is already divided by the counts of the whole
mini-batch over all ranks. So gradients are summed over micro-batches and ranks, and nothing is averaged twice. The same
holds for statistics: their sum over micro-batches and ranks is the value of the mini-batch.
"""

import inspect
from dataclasses import asdict, dataclass

import torch

from hybridrl.algos.aggregate import agg_loss, loss_counts
from hybridrl.algos.kl import kl_penalty
from hybridrl.algos.policy_losses import OWN_AGG_MODES, get_policy_loss
from hybridrl.algos.value_losses import clipped_value_loss
from hybridrl.config.schema.workers import ActorConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import LossFn


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of a mini-batch over all ranks: response tokens and sequences with at least one of them."""

    num_tokens: float
    num_seqs: float

    @classmethod
    def local(cls, response_mask_BT: torch.Tensor) -> list[float]:
        """Return this rank's share of both counts, to be summed over ranks."""
        return [float(count) for count in loss_counts(response_mask_BT)]


def actor_loss(config: ActorConfig, counts: GlobalCounts) -> LossFn:
    """Return the policy loss: clipped surrogate, minus entropy bonus, plus KL to the reference policy if configured."""
    surrogate = get_policy_loss(config.policy_loss.loss_mode)
    names = inspect.signature(surrogate).parameters
    own_settings = {name: value for name, value in asdict(config.policy_loss).items() if name in names}
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_BT = rows.batch["response_mask"].float()

        def reduce(values_BT: torch.Tensor, mode: str = "token-mean") -> torch.Tensor:
            return agg_loss(
                values_BT,
                mask_BT,
                mode,
                num_tokens=counts.num_tokens,
                num_seqs=counts.num_seqs,
                max_len=mask_BT.size(-1),
            )

        parts = surrogate(
            outputs["log_probs"],
            rows.batch["old_log_probs"],
            weighted_advantages(rows),
            mask_BT,
            clip_low=low,
            clip_high=high,
            clip_c=config.clip_ratio_c,
            **own_settings,
        )
        loss = pg_loss = reduce(parts.losses_BT, OWN_AGG_MODES.get(config.policy_loss.loss_mode, config.loss_agg_mode))
        stats = {
            "actor/pg_loss": pg_loss,
            "actor/pg_clipfrac": reduce(parts.clipped_BT.float()),
            "actor/pg_clipfrac_lower": reduce(parts.clipped_lower_BT.float()),
            "actor/ppo_kl": reduce(parts.approx_kl_BT),
        }
        if config.entropy_coeff:
            entropy_loss = reduce(outputs["entropy"], config.loss_agg_mode)
            loss = loss - config.entropy_coeff * entropy_loss
            stats["actor/entropy_loss"] = entropy_loss
        if config.use_kl_loss:
            kl_BT = kl_penalty(outputs["log_probs"], rows.batch["ref_log_prob"], config.kl_loss_type)
            kl_loss = reduce(kl_BT, config.loss_agg_mode)
            loss = loss + config.kl_loss_coef * kl_loss
            stats["actor/kl_loss"] = kl_loss
        return loss, stats | {"actor/loss": loss}

    return loss_fn


def weighted_advantages(rows: DataProto) -> torch.Tensor:
    """Return the advantages (B, R), times the importance weights of the rollout correction if there are any."""
    advantages_BT, weights_BT = rows.batch["advantages"], rows.batch.get("rollout_is_weights", None)
    return advantages_BT if weights_BT is None else advantages_BT * weights_BT


def critic_loss(cliprange_value: float, counts: GlobalCounts) -> LossFn:
    """Return the clipped value loss, averaged over response tokens."""

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_BT = rows.batch["response_mask"].float()

        def mean(values_BT: torch.Tensor) -> torch.Tensor:
            return agg_loss(values_BT, mask_BT, "token-mean", num_tokens=counts.num_tokens, num_seqs=counts.num_seqs)

        losses_BT, clipped_BT = clipped_value_loss(
            outputs["values"], rows.batch["values"], rows.batch["returns"], cliprange=cliprange_value
        )
        loss = mean(losses_BT)
        return loss, {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": mean(clipped_BT.float()),
            "critic/vpred_mean": mean(outputs["values"]),
        }

    return loss_fn


def sft_loss(counts: GlobalCounts) -> LossFn:
    """Return the mean negative log-likelihood of the tokens whose `response_mask` is 1."""

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_BT = rows.batch["response_mask"].float()
        loss = agg_loss(
            -outputs["log_probs"], mask_BT, "token-mean", num_tokens=counts.num_tokens, num_seqs=counts.num_seqs
        )
        return loss, {"loss": loss}

    return loss_fn
