"""Workers that train one model on the batches of the driver, on the same engine as PPO's actor.

`SupervisedWorker` is what supervised fine-tuning, preference learning and reward models share; `SFTWorker` is the
first of them. Their trainers call them.
"""

from collections.abc import Callable

import torch

from hybridrl.algos.aggregate import agg_loss
from hybridrl.config.engines import supervised_engine_settings
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.workers.engine.base import Engine, EngineSetup, LossFn, MicroBatching
from hybridrl.workers.engine.export import export_adapter, export_hf
from hybridrl.workers.engine_worker import TrainingWorker, lora_of, make_engine, micro_batching, required_path
from hybridrl.workers.losses import GlobalCounts
from hybridrl.workers.mini_batch import ENGINE_COMPUTE, MINI_BATCH_COMPUTE
from hybridrl.workers.process_setup import sum_dicts_over_ranks, sum_over_ranks


class SupervisedWorker(TrainingWorker):
    """One process of the trained model.

    Args:
        config: Settings of the whole job.
        role: Name of the role.

    Attributes:
        default_role: Name of the role where none is given.
        kind: What the model computes, see `EngineSetup`.
        sequences_per_row: Sequences of one row of the data, which stay in one micro-batch.
    """

    default_role: str
    kind = "causal_lm"
    sequences_per_row = 1

    def __init__(self, config: SupervisedConfig, role: str | None = None):
        self.config, self.role = config, role or self.default_role

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_optimizer_steps: int = 0) -> None:
        """Load the model onto the device. `total_optimizer_steps`: length of the learning-rate schedule."""
        self._start_process()
        self.model = self._set_up(make_engine(self.config.strategy, self._engine_setup(total_optimizer_steps)))

    @property
    def trained_engine(self) -> Engine:
        return self.model

    @property
    def _engine_settings(self) -> EngineSettings:
        return supervised_engine_settings(self.config)

    def _engine_setup(self, total_optimizer_steps: int) -> EngineSetup:
        config = self.config
        return EngineSetup(
            kind=self.kind,
            path=required_path(config.model.path),
            trust_remote_code=config.model.trust_remote_code,
            override_config=dict(config.model.override_config),
            device=self.device,
            settings=self._engine_settings,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
            packed=config.model.use_remove_padding,
            optim=config.optim,
            total_steps=total_optimizer_steps,
            grad_clip=config.grad_clip,
            seed=config.trainer.seed,
            lora=lora_of(config.model),
            freeze_vision_tower=config.freeze_vision_tower,
            whole_logits=not config.model.use_fused_kernels,
        )

    def _train(
        self, data: DataProto, make_loss: Callable[[GlobalCounts], LossFn], *, outputs: tuple[str, ...]
    ) -> DataProto:
        """Take one optimizer step. Metrics as in `ActorRolloutRefWorker.update_actor`."""
        with self._trained(optimizer=True) as model:
            metrics = self._update(
                model, data, self._micro(), make_loss=make_loss, outputs=outputs, epochs=1, prefix="train"
            )
        return DataProto(meta_info={"metrics": metrics})

    def _evaluate(
        self, data: DataProto, make_loss: Callable[[GlobalCounts], LossFn], *, outputs: tuple[str, ...]
    ) -> DataProto:
        """Return the loss of a batch and its statistics over all ranks, without training."""
        [counts] = self._global_counts([data], counted=self.model.mesh_position.is_output_rank)
        with self._trained() as model:
            found = model.forward(data, self._micro(), outputs=outputs)
        _, stats = make_loss(counts)(found, data)
        counted = self.model.mesh_position.is_output_rank  # its peers have the same rows
        [metrics] = sum_dicts_over_ranks([{name: float(value) * counted for name, value in stats.items()}])
        return DataProto(meta_info={"metrics": {name: [value] for name, value in metrics.items()}})

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, directory: str) -> None:
        """Write the model as Hugging Face safetensors with config and tokenizer, and verify names and values."""
        with self._trained() as model:
            export_hf(model.weights(), directory, model=self.config.model, rank=self.rank, kind=self.kind)

    @register(Dispatch.ONE_TO_ALL)
    def export_adapter(self, directory: str) -> None:
        """Write the model's adapters in peft's format, and verify names and values."""
        with self._trained() as model:
            weights, lora = model.weights(lora="unscaled_adapters"), lora_of(self.config.model)
            export_adapter(weights, directory, model=self.config.model, lora=lora, rank=self.rank)

    def _micro(self) -> MicroBatching:
        data = self.config.data
        max_rows = data.micro_batch_size_per_gpu and data.micro_batch_size_per_gpu * self.sequences_per_row
        return micro_batching(data.use_dynamic_bsz, data.max_token_len_per_gpu, max_rows)


class SFTWorker(SupervisedWorker):
    """One process of supervised fine-tuning.

    Args:
        config: Settings of the whole job.
        role: Name of the role.
    """

    default_role = "sft"

    @register(MINI_BATCH_COMPUTE)
    def update(self, data: DataProto) -> DataProto:
        """Take one optimizer step on a batch of conversations. Metrics as in `ActorRolloutRefWorker.update_actor`."""
        return self._train(data, sft_loss, outputs=("log_probs",))

    @register(ENGINE_COMPUTE)
    def compute_loss(self, data: DataProto) -> tuple[float, float]:
        """Return (sum of negative log-likelihoods, number of tokens) over all ranks, the same on every rank."""
        with self._trained() as model:
            log_probs = model.forward(data, self._micro(), outputs=("log_probs",))["log_probs"]
        num_tokens, _ = GlobalCounts.local(data.batch["response_mask"])
        counted = self.model.mesh_position.is_output_rank  # its peers have the same rows
        own = [-float(log_probs.double().sum()) * counted, num_tokens * counted]
        total, count = sum_over_ranks(own, device=self.device)
        return total, count


def sft_loss(counts: GlobalCounts) -> LossFn:
    """Return the mean negative log-likelihood of the tokens whose `response_mask` is 1."""

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_BT = rows.batch["response_mask"].float()
        loss = agg_loss(
            -outputs["log_probs"], mask_BT, "token-mean", num_tokens=counts.num_tokens, num_seqs=counts.num_seqs
        )
        return loss, {"loss": loss}

    return loss_fn
