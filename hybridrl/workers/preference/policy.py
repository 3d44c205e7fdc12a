"""`PreferenceWorker`: one process of a policy that learns from preferences. `DPOTrainer` calls it."""

from dataclasses import replace
from typing import cast

import torch

from hybridrl.algos.preference_losses import PREFERENCE_LOSSES, sequence_scores
from hybridrl.config.schema.preference import DPOConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.workers.engine.base import AdapterEngine, Engine
from hybridrl.workers.engine_worker import make_engine, on_device
from hybridrl.workers.mini_batch import ENGINE_COMPUTE, MINI_BATCH_COMPUTE
from hybridrl.workers.preference.losses import preference_loss
from hybridrl.workers.sft import SupervisedWorker


class PreferenceWorker(SupervisedWorker):
    """One process of the trained policy and, if the loss needs one, of the frozen reference policy.

    The reference is the model at `model.path`: a second copy of the weights without an optimizer. A policy with
    adapters is its own reference: the model without them.

    Args:
        config: Settings of the whole job.
        role: Name of the role.
    """

    config: DPOConfig

    def __init__(self, config: DPOConfig, role: str = "dpo"):
        super().__init__(config, role)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_optimizer_steps: int = 0) -> None:
        """Load the policy and the reference onto the device, see `SupervisedWorker.init_model`."""
        super().init_model(total_optimizer_steps)
        loss = PREFERENCE_LOSSES.lookup(self.config.loss.loss_type)
        self.sequences_per_row = 2 if loss.is_paired else 1
        if loss.needs_reference and not self.config.model.uses_lora:
            settings = self._offload.with_offload(params=self.config.ref.fsdp_config.param_offload, optimizer=False)
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
        log_probs_B = self._sequence_log_probs(self.model, data, offload=self._offload.param_offload)
        return DataProto.from_dict(tensors={"scores": log_probs_B - self._reference_log_probs(data)})

    def _reference_log_probs(self, data: DataProto) -> torch.Tensor:
        if not self.config.model.uses_lora:
            offload = self.config.ref.fsdp_config.param_offload
            return self._sequence_log_probs(self.reference, data, offload=offload)
        with cast(AdapterEngine, self.model).adapters_off():
            return self._sequence_log_probs(self.model, data, offload=self._offload.param_offload)

    def _sequence_log_probs(self, engine: Engine, data: DataProto, *, offload: bool) -> torch.Tensor:
        with on_device(engine, self.device, params=offload):
            log_probs_BR = engine.forward(data, self._micro(), outputs=("log_probs",))["log_probs"]
        return sequence_scores(log_probs_BR, data.batch["response_mask"])

    @register(MINI_BATCH_COMPUTE)
    def update(self, data: DataProto) -> DataProto:
        """Take one optimizer step on a batch of preferences, with the columns that `losses.py` lists."""
        return self._train(data, preference_loss(self.config.loss), outputs=("log_probs",))

    @register(MINI_BATCH_COMPUTE)
    def evaluate(self, data: DataProto) -> DataProto:
        """Return the loss and its statistics without training, as `meta_info["metrics"]`."""
        return self._evaluate(data, preference_loss(self.config.loss), outputs=("log_probs",))
