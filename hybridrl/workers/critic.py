"""`CriticWorker`: one process of PPO's value model. The trainer calls it."""

import torch

from hybridrl.algos.aggregate import agg_loss
from hybridrl.algos.value_losses import clipped_value_loss
from hybridrl.config.engines import critic_engine_settings, update_batching
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.workers.engine.base import Engine, LossFn
from hybridrl.workers.engine_worker import TrainingWorker, engine_setup, make_engine, micro_batching
from hybridrl.workers.losses import GlobalCounts
from hybridrl.workers.mini_batch import ENGINE_COMPUTE, MINI_BATCH_COMPUTE


class CriticWorker(TrainingWorker):
    """One process of the critic: a token-level value head on a language model.

    Args:
        config: Settings of the whole job.
        role: Name of the role.
    """

    def __init__(self, config: PPOConfig, role: str = "critic"):
        self.config, self.role = config, role

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_optimizer_steps: int = 0) -> None:
        """Load the value model onto the device. `total_optimizer_steps`: length of the learning-rate schedule."""
        critic = self.config.critic
        self._start_process()
        setup = engine_setup(
            self.config,
            kind="value",
            path=critic.model.path or self.config.actor_rollout_ref.model.path,
            settings=self._engine_settings,
            device=self.device,
            packed=critic.model.use_remove_padding,
            gradient_checkpointing=critic.model.enable_gradient_checkpointing,
            optim=critic.optim,
            total_steps=total_optimizer_steps,
            grad_clip=critic.grad_clip,
        )
        self.critic = self._set_up(make_engine(critic.strategy, setup))

    @property
    def trained_engine(self) -> Engine:
        return self.critic

    @register(ENGINE_COMPUTE)
    def compute_values(self, data: DataProto) -> DataProto:
        """Return `values` (B, R) float32: the value of the state before each response token."""
        micro = micro_batching(*update_batching(self.config.critic))
        with self._trained() as critic:
            out = critic.forward(data, micro, outputs=("values",))
        return DataProto.from_dict(tensors={"values": out["values"]})

    @register(MINI_BATCH_COMPUTE)
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on a batch with `values` and `returns`. Metrics as in `ActorRolloutRefWorker.update_actor`."""
        cliprange, micro = self.config.critic.cliprange_value, micro_batching(*update_batching(self.config.critic))
        with self._trained(optimizer=True) as critic:
            metrics = self._update(
                critic,
                data,
                micro,
                make_loss=lambda counts: critic_loss(cliprange, counts),
                outputs=("values",),
                epochs=self.config.actor_rollout_ref.actor.ppo_epochs,
                prefix="critic",
            )
        return DataProto(meta_info={"metrics": metrics})

    @property
    def _engine_settings(self) -> EngineSettings:
        return critic_engine_settings(self.config)


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
            "critic/vf_clipfrac": mean(clipped_BT),
            "critic/vpred_mean": mean(outputs["values"]),
        }

    return loss_fn
