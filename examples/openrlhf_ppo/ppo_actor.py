"""Role actor: the policy that is trained, one copy per process; gradients are summed over the processes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from examples.openrlhf_ppo import common, remote_call
from hybridrl.algos import agg_loss, get_policy_loss
from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.sdk import rpc
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.worker import Worker
from hybridrl.system.machine import shared_memory_id
from hybridrl.workers.weight_transfer import OutgoingWeights, PushReceipt, Sender, SenderAddress, make_sender

DIRECTORY = "actor"


class PolicyModelActor(Worker):
    """One process of the policy."""

    learner: common.Learner  # from `init` on
    sender: Sender  # of rank 0, from `open_weight_channel` on

    def __init__(self, config: Mapping[str, Any]):
        self.args, self.is_ready = config, False
        self.experiences: list[remote_call.Experience] = []

    @rpc(remote_call.actor_init)
    def init(self) -> None:
        if self.is_ready:
            return
        common.init_torch()
        common.init_process_group()
        self.learner = common.Learner(common.make_policy(self.args), lr=self.args["actor_learning_rate"])
        self.is_ready = True

    @rpc(remote_call.actor_forward)
    @torch.no_grad()
    def forward(
        self,
        sequences: Sequence[torch.Tensor],
        action_mask: Sequence[torch.Tensor],
        attention_mask: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        log_probs_BR = common.response_log_probs(
            self.learner.model, common.stack(sequences), common.stack(attention_mask), len(action_mask[0])
        )
        return list(log_probs_BR * common.stack(action_mask))

    @rpc(remote_call.append_experience)
    def append(self, experiences: Sequence[remote_call.Experience]) -> list[None]:
        self.experiences += experiences
        return [None] * len(experiences)

    @rpc(remote_call.actor_update)
    def update(self) -> dict[str, float]:
        """Train `max_epochs` times on the stored rows, in mini-batches, and drop them."""
        rows, self.experiences = self.experiences, []
        size = self.args["train_batch_size"] // self.world_size
        batches = self.args["max_epochs"] * common.mini_batches(rows, size)
        norms = [self.learner.update(partial(self._loss, batch)) for batch in batches]
        return {"grad_norm": sum(norms) / len(norms), "num_updates": self.learner.num_updates}

    def _loss(self, batch: Sequence[remote_call.Experience]) -> torch.Tensor:
        """Return this process's part of the policy loss, a mean over the tokens of all processes."""
        column = common.columns(batch)
        mask_BR = column["action_mask"]
        log_probs_BR = common.response_log_probs(
            self.learner.model, column["sequence"], column["attention_mask"], mask_BR.shape[1]
        )
        loss = get_policy_loss("vanilla")(
            log_probs_BR,
            column["log_probs"],
            column["advantages"],
            mask_BR,
            clip_low=self.args["eps_clip_low"],
            clip_high=self.args["eps_clip_high"],
            clip_c=3.0,
        )
        return agg_loss(
            loss.losses_BT, mask_BR, "token-mean", num_tokens=common.token_count(mask_BR), num_seqs=len(batch)
        )

    # -- the sending end of a push; `WeightSync` calls it

    @register(Dispatch.ONE_TO_ALL)
    def machine_id(self) -> str:
        return shared_memory_id()

    @register(Dispatch.ONE_TO_ALL)
    def open_weight_channel(self, transport: str, num_receivers: int) -> SenderAddress | None:
        """Prepare rank 0 for pushes; return the address that the rollout connects to, if the transport has one."""
        if self.rank != 0:
            return None
        host, _ = self.get_master_addr_port()
        self.sender = make_sender(
            transport, WeightSyncConfig(), host=host, num_receivers=num_receivers, device="cpu", timeout_s=60.0
        )
        return self.sender.address

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int, adapters: bool = False) -> PushReceipt | None:
        """Send the policy from rank 0."""
        if self.rank != 0:
            return None
        weights = OutgoingWeights(self.learner.model.named_parameters(), torch.float32)
        return self.sender.send(version, weights)

    # -- checkpoints

    @rpc(remote_call.save_checkpoint)
    def save(self, directory: str) -> None:
        self.learner.save(f"{directory}/{DIRECTORY}")

    @rpc(remote_call.load_checkpoint)
    def load(self, directory: str) -> None:
        self.learner.load(f"{directory}/{DIRECTORY}")
        self.experiences = []

    @rpc(remote_call.end_job)
    def end(self) -> None:
        if self.rank == 0:
            self.sender.close()
