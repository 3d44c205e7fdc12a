"""`ResponseColumns`: outputs of agent loops as the batch that a batched call would return.

Shapes: S rows, prompts of width P, responses of width R = data.max_response_length.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import AGENT_REWARD, BRANCHES, LEFT_OUT
from hybridrl.serving.agent_loop.base import UNSET_VERSION, AgentLoopOutput
from hybridrl.workers.engine.base import ROUTED_EXPERTS
from hybridrl.workers.rollout.requests import NOT_SAMPLED
from hybridrl.workers.rollout.responses import padded, prompt_columns, sequence_columns


@dataclass(frozen=True, kw_only=True)
class ResponseColumns:
    """Which columns a batch has beside those of every batch.

    Attributes:
        width: R.
        pad_id: Token right of a response, and left of a prompt that an agent has written.
        log_probs: `rollout_log_probs` (S, R) float32.
        token_versions: `token_versions` (S, R) int64.
        branches: The other conversations of each row.
        routes: `routed_experts`, an object of each row.
    """

    width: int
    pad_id: int
    log_probs: bool
    token_versions: bool
    branches: bool
    routes: bool = False

    def batch(self, rows: DataProto, outputs: list[AgentLoopOutput]) -> DataProto:
        """Return prompts and responses.

        Args:
            rows: The prompt of each of the S rows.
            outputs: S outputs.
        """
        columns = cast(dict[str, torch.Tensor], dict(rows.batch.items()))
        columns |= self._own_prompts(columns, outputs)
        columns |= self._responses(columns, outputs)
        if self.token_versions:
            versions = [out.all_token_versions for out in outputs]
            columns["token_versions"] = padded(versions, self.width, fill=NOT_SAMPLED)
        if self.log_probs:
            log_probs = [out.response_logprobs for out in outputs]
            columns["rollout_log_probs"] = padded(log_probs, self.width, fill=0.0)
        return DataProto.from_dict(
            tensors=columns, non_tensors=self._judgements(outputs), meta_info=dict(rows.meta_info)
        )

    def _responses(self, columns: dict[str, torch.Tensor], outputs: list[AgentLoopOutput]) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([len(out.response_ids) for out in outputs], dtype=torch.int64)
        responses = padded([out.response_ids for out in outputs], self.width, fill=self.pad_id)
        versions = [-1 if out.version == UNSET_VERSION else out.version for out in outputs]
        return sequence_columns(columns, responses, torch.arange(self.width) < lengths[:, None]) | {
            "response_mask": padded([out.response_mask for out in outputs], self.width),
            "weights_version": torch.tensor(versions, dtype=torch.int64),
            "num_turns": torch.tensor([out.num_turns for out in outputs], dtype=torch.int64),
        }

    def _judgements(self, outputs: list[AgentLoopOutput]) -> dict[str, np.ndarray]:
        """Return rewards of agents, samples that are left out, and branches, where there are any."""
        rewards = np.fromiter((out.reward for out in outputs), dtype=object, count=len(outputs))
        left_out = np.fromiter((out.is_left_out for out in outputs), dtype=object, count=len(outputs))
        others = {AGENT_REWARD: rewards} if any(out.reward is not None for out in outputs) else {}
        others |= {LEFT_OUT: left_out} if left_out.any() else {}
        if self.branches:
            branches = ([one.as_branch() for one in out.branches] for out in outputs)
            others[BRANCHES] = np.fromiter(branches, dtype=object, count=len(outputs))
        if any(out.images is not None for out in outputs):
            others[IMAGE_INPUTS] = np.fromiter((out.images for out in outputs), dtype=object, count=len(outputs))
        if self.routes:
            others[ROUTED_EXPERTS] = np.fromiter((out.routes for out in outputs), dtype=object, count=len(outputs))
        return others

    def _own_prompts(self, columns: dict[str, torch.Tensor], outputs: list[AgentLoopOutput]) -> dict[str, torch.Tensor]:
        """Return the prompt's columns (S, P) where agents have written prompts of their own; else nothing."""
        given = zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)
        if all(ids[mask].tolist() == out.prompt_ids for (ids, mask), out in zip(given, outputs, strict=True)):
            return {}
        return prompt_columns([out.prompt_ids for out in outputs], pad_token_id=self.pad_id)
