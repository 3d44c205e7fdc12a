"""Role reward: scores responses by a rule. A reward model would be a forward pass in its place."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from examples.openrlhf_ppo import common, remote_call
from hybridrl.sdk import rpc


class RewardModelRayActor:
    """One process that scores."""

    def __init__(self, config: Mapping[str, Any]):
        self.args = config

    @rpc(remote_call.reward_init)
    def init(self) -> None:
        common.init_torch()

    @rpc(remote_call.reward_forward)
    def forward(self, sequences: Sequence[torch.Tensor], action_mask: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return 1 / R for every response token that repeats the prompt's token at its place, 0 for the others."""
        prompt_len, sequences_BT = self.args["prompt_len"], common.stack(sequences)
        is_right_BR = sequences_BT[:, prompt_len:] == sequences_BT[:, :prompt_len]
        return list(is_right_BR * common.stack(action_mask) / prompt_len)

    @rpc(remote_call.end_job)
    def end(self) -> None: ...
