"""Role reference: the policy at the start, which the KL penalty compares with. Optional."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from examples.openrlhf_ppo import common, remote_call
from hybridrl.sdk import rpc


class PPOReferenceActor:
    """One process of the reference policy."""

    model: torch.nn.Module  # from `init` on

    def __init__(self, config: Mapping[str, Any]):
        self.args, self.is_ready = config, False

    @rpc(remote_call.reference_init)
    def init(self) -> None:
        if self.is_ready:
            return
        common.init_torch()
        self.model = common.make_policy(self.args)
        self.is_ready = True

    @rpc(remote_call.reference_forward)
    @torch.no_grad()
    def forward(
        self,
        sequences: Sequence[torch.Tensor],
        action_mask: Sequence[torch.Tensor],
        attention_mask: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        log_probs_BR = common.response_log_probs(
            self.model, common.stack(sequences), common.stack(attention_mask), len(action_mask[0])
        )
        return list(log_probs_BR * common.stack(action_mask))

    @rpc(remote_call.end_job)
    def end(self) -> None: ...
