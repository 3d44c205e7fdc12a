"""Role critic: the value model that is trained beside the policy."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from examples.openrlhf_ppo import common, remote_call
from hybridrl.algos import agg_loss, clipped_value_loss
from hybridrl.sdk import rpc
from hybridrl.single_controller.worker import Worker

DIRECTORY = "critic"


class CriticModelRayActor(Worker):
    """One process of the value model."""

    learner: common.Learner  # from `init` on

    def __init__(self, config: Mapping[str, Any]):
        self.args, self.is_ready = config, False
        self.experiences: list[remote_call.Experience] = []

    @rpc(remote_call.critic_init)
    def init(self) -> None:
        if self.is_ready:
            return
        common.init_torch()
        common.init_process_group()
        self.learner = common.Learner(common.Critic(self.args), lr=self.args["critic_learning_rate"])
        self.is_ready = True

    @rpc(remote_call.critic_forward)
    @torch.no_grad()
    def forward(
        self,
        sequences: Sequence[torch.Tensor],
        action_mask: Sequence[torch.Tensor],
        attention_mask: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        values_BR = self._values(common.stack(sequences), common.stack(attention_mask), len(action_mask[0]))
        return list(values_BR * common.stack(action_mask))

    def _values(
        self, sequences_BT: torch.Tensor, attention_mask_BT: torch.Tensor, num_response_tokens: int
    ) -> torch.Tensor:
        """Return the value of the state before each response token (B, R)."""
        return self.learner.model(sequences_BT, attention_mask_BT)[:, -num_response_tokens - 1 : -1]

    @rpc(remote_call.append_experience)
    def append(self, experiences: Sequence[remote_call.Experience]) -> list[None]:
        self.experiences += experiences
        return [None] * len(experiences)

    @rpc(remote_call.critic_update)
    def update(self) -> dict[str, float]:
        """Train `max_epochs` times on the stored rows, in mini-batches, and drop them."""
        rows, self.experiences = self.experiences, []
        size = self.args["train_batch_size"] // self.world_size
        batches = self.args["max_epochs"] * common.mini_batches(rows, size)
        norms = [self.learner.update(partial(self._loss, batch)) for batch in batches]
        return {"grad_norm": sum(norms) / len(norms), "num_updates": self.learner.num_updates}

    def _loss(self, batch: Sequence[remote_call.Experience]) -> torch.Tensor:
        column = common.columns(batch)
        mask_BR = column["action_mask"]
        values_BR = self._values(column["sequence"], column["attention_mask"], mask_BR.shape[1])
        losses_BR, _ = clipped_value_loss(
            values_BR, column["values"], column["returns"], cliprange=self.args["value_clip"]
        )
        return agg_loss(losses_BR, mask_BR, "token-mean", num_tokens=common.token_count(mask_BR), num_seqs=len(batch))

    @rpc(remote_call.save_checkpoint)
    def save(self, directory: str) -> None:
        self.learner.save(f"{directory}/{DIRECTORY}")

    @rpc(remote_call.load_checkpoint)
    def load(self, directory: str) -> None:
        self.learner.load(f"{directory}/{DIRECTORY}")
        self.experiences = []

    @rpc(remote_call.end_job)
    def end(self) -> None: ...
