"""Workers that learn from preferences, and their losses.

`PreferenceWorker` is one process of a policy (`DPOTrainer`), `RewardTrainingWorker` one of a reward model
(`RMTrainer`). The formulas are in `algos/preference_losses.py`. A loss and its statistics are divided by the number of
comparisons of the mini-batch over all ranks. So gradients and statistics are summed over micro-batches and ranks.

Shapes: B rows of a micro-batch, N pairs. Columns of the rows: `pair` (B,) int64, the same for both rows of a pair;
`preferred` (B,) int64, 1 for a chosen or desirable response; `ref_sequence_log_probs` (B,) for losses with a reference;
`kto_baseline` (B,), the same number in every row; `margin` (B,) for reward models with margins.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from hybridrl.algos.preference_losses import PREFERENCE_LOSSES, PreferenceLoss, bradley_terry, sequence_scores
from hybridrl.config.schema.preference import DPOConfig, PreferenceLossConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.workers.engine.base import AdapterEngine, Engine, LossFn
from hybridrl.workers.engine.batching.micro_batches import PAIR
from hybridrl.workers.engine_worker import make_engine, on_device
from hybridrl.workers.losses import GlobalCounts
from hybridrl.workers.mini_batch import ENGINE_COMPUTE, MINI_BATCH_COMPUTE
from hybridrl.workers.sft import SupervisedWorker

Stats = dict[str, torch.Tensor]


class PreferenceWorker(SupervisedWorker):
    """One process of the trained policy and, if the loss needs one, of the frozen reference policy.

    The reference is the model at `model.path`: a second copy of the weights without an optimizer. A policy with
    adapters is its own reference: the model without them.

    Args:
        config: Settings of the whole job.
        role: Name of the role.
    """

    config: DPOConfig
    default_role = "dpo"

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_optimizer_steps: int = 0) -> None:
        """Load the policy and the reference onto the device, see `SupervisedWorker.init_model`."""
        super().init_model(total_optimizer_steps)
        loss = PREFERENCE_LOSSES.lookup(self.config.loss.loss_type)
        self.sequences_per_row = 2 if loss.is_paired else 1
        if loss.needs_reference and not self.config.model.uses_lora:
            offloads = self.config.ref.fsdp_config.param_offload
            settings = self._engine_settings.with_offload(params=offloads, optimizer=False)
            setup = self._engine_setup(total_optimizer_steps)
            setup = replace(setup, settings=settings, optim=None, gradient_checkpointing=False)
            self.reference = self._set_up(make_engine(self.config.strategy, setup))

    @register(ENGINE_COMPUTE)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return `ref_sequence_log_probs` (B,) float32: the reference's summed log-probs of the responses."""
        log_probs_B = self._reference_log_probs(data)
        return DataProto.from_dict(tensors={"ref_sequence_log_probs": log_probs_B})

    @register(ENGINE_COMPUTE)
    def compute_scores(self, data: DataProto) -> DataProto:
        """Return `scores` (B,) float32: summed log-probs of the responses under the policy, minus the reference's."""
        log_probs_B = self._sequence_log_probs(self.model, data, offload=self._engine_settings.param_offload)
        return DataProto.from_dict(tensors={"scores": log_probs_B - self._reference_log_probs(data)})

    def _reference_log_probs(self, data: DataProto) -> torch.Tensor:
        if not self.config.model.uses_lora:
            offload = self.config.ref.fsdp_config.param_offload
            return self._sequence_log_probs(self.reference, data, offload=offload)
        with cast(AdapterEngine, self.model).adapters_off():
            return self._sequence_log_probs(self.model, data, offload=self._engine_settings.param_offload)

    def _sequence_log_probs(self, engine: Engine, data: DataProto, *, offload: bool) -> torch.Tensor:
        with on_device(engine, self.device, params=offload):
            log_probs_BR = engine.forward(data, self._micro(), outputs=("log_probs",))["log_probs"]
        return sequence_scores(log_probs_BR, data.batch["response_mask"])

    @register(MINI_BATCH_COMPUTE)
    def update(self, data: DataProto) -> DataProto:
        """Take one optimizer step on a batch of preferences, with the columns listed above."""
        return self._train(data, preference_loss(self.config.loss), outputs=("log_probs",))

    @register(MINI_BATCH_COMPUTE)
    def evaluate(self, data: DataProto) -> DataProto:
        """Return the loss and its statistics without training, as `meta_info["metrics"]`."""
        return self._evaluate(data, preference_loss(self.config.loss), outputs=("log_probs",))


class RewardTrainingWorker(SupervisedWorker):
    """One process of the trained reward model: a sequence classifier with one output, read at the last token.

    `RewardModelWorker` loads its export as `reward_model.model.path`.

    Args:
        config: Settings of the whole job.
        role: Name of the role.
    """

    default_role, kind = "rm", "score"
    sequences_per_row = 2

    @register(MINI_BATCH_COMPUTE)
    def update(self, data: DataProto) -> DataProto:
        """Take one optimizer step on a batch of pairs."""
        return self._train(data, reward_loss, outputs=("scores",))

    @register(MINI_BATCH_COMPUTE)
    def evaluate(self, data: DataProto) -> DataProto:
        """Return the loss and its statistics without training, as `meta_info["metrics"]`."""
        return self._evaluate(data, reward_loss, outputs=("scores",))


def preference_loss(config: PreferenceLossConfig) -> Callable[[GlobalCounts], LossFn]:
    """Return what makes the configured loss for the counts of a mini-batch."""
    loss = PREFERENCE_LOSSES.lookup(config.loss_type)
    settings = {name: getattr(config, name) for name in loss.settings}

    def make_loss(counts: GlobalCounts) -> LossFn:
        def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, Stats]:
            log_probs_B = sequence_scores(outputs["log_probs"], rows.batch["response_mask"])
            scores_B = policy_scores(log_probs_B, rows, loss)
            if loss.is_paired:
                chosen_N, rejected_N = split_pairs(scores_B, rows)
                losses, num = loss.fn(chosen_N, rejected_N, **settings), counts.num_seqs / 2
            else:
                baseline_B = rows.batch["kto_baseline"]
                losses = loss.fn(scores_B, rows.batch["preferred"], baseline_B, **settings)
                num = counts.num_seqs
            total = losses.sum() / num
            return total, {"loss": total} | _policy_stats(scores_B, log_probs_B, rows, loss, beta=config.beta, num=num)

        return loss_fn

    return make_loss


def reward_loss(counts: GlobalCounts) -> LossFn:
    """Return the Bradley-Terry loss of a reward model, averaged over pairs."""

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, Stats]:
        chosen_N, rejected_N = split_pairs(outputs["scores"], rows)
        margin_B = rows.batch.get("margin", None)
        margin_N = None if margin_B is None else split_pairs(margin_B, rows)[0]
        num = counts.num_seqs / 2
        total = bradley_terry(chosen_N, rejected_N, margin_N).sum() / num
        return total, {"loss": total} | _pair_stats(chosen_N, rejected_N, num=num)

    return loss_fn


def policy_scores(log_probs_B: torch.Tensor, rows: DataProto, loss: PreferenceLoss) -> torch.Tensor:
    """Return the scores (B,) that a loss compares, from the summed log-probs (B,) of the policy."""
    scores_B = log_probs_B - rows.batch["ref_sequence_log_probs"] if loss.needs_reference else log_probs_B
    return scores_B / rows.batch["response_mask"].sum(-1).clamp(min=1) if loss.is_mean else scores_B


def split_pairs(values_B: torch.Tensor, rows: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values (N,) of the chosen and of the rejected rows, pair by pair.

    The order of the rows does not matter.
    """
    order_B = torch.argsort(2 * rows.batch[PAIR] + 1 - rows.batch["preferred"])
    sorted_B = values_B[order_B.to(values_B.device)]
    return sorted_B[0::2], sorted_B[1::2]


def _pair_stats(chosen_N: torch.Tensor, rejected_N: torch.Tensor, *, num: float) -> Stats:
    """Return statistics of rewards (N,), under TRL's names."""
    return {
        "rewards/chosen": chosen_N.sum() / num,
        "rewards/rejected": rejected_N.sum() / num,
        "rewards/margins": (chosen_N - rejected_N).sum() / num,
        "rewards/accuracies": (chosen_N > rejected_N).float().sum() / num,
    }


def _policy_stats(
    scores_B: torch.Tensor, log_probs_B: torch.Tensor, rows: DataProto, loss: PreferenceLoss, *, beta: float, num: float
) -> Stats:
    """Return statistics of implicit rewards and log-probs.

    Sums over one kind of response are divided by the number of comparisons also where a comparison is one response;
    the driver knows how many there are of each kind.
    """
    rewards_B, log_probs_B = beta * scores_B.detach(), log_probs_B.detach()
    is_preferred_B = rows.batch["preferred"].bool()
    zero = torch.zeros_like(log_probs_B)
    stats = {
        "logps/chosen": torch.where(is_preferred_B, log_probs_B, zero).sum() / num,
        "logps/rejected": torch.where(is_preferred_B, zero, log_probs_B).sum() / num,
    }
    if loss.is_paired:
        return stats | _pair_stats(*split_pairs(rewards_B, rows), num=num)
    return stats | {
        "rewards/chosen": torch.where(is_preferred_B, rewards_B, zero).sum() / num,
        "rewards/rejected": torch.where(is_preferred_B, zero, rewards_B).sum() / num,
    }
