"""`TimedGenerator`: stand-ins in place of agent loops and their router. Parts of responses are batched calls here.

With continuous batching a router's replicas generate what one call generates. So the requests themselves are not
simulated.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from hybridrl.config import PPOConfig
from hybridrl.data_plane.meta_info import CHOSEN_GROUPS
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop.short_round import round_limits, shortest_groups
from hybridrl.trainer.ppo.policy.generator import PendingResponses
from hybridrl.trainer.ppo.policy.rollout_pipeline import BatchedGenerator
from hybridrl.workers.rollout.requests import NOT_SAMPLED

NUM_TURNS = 2  # of every response: prompt and answer


class TimedGenerator(BatchedGenerator):
    """Generates the responses of stand-ins, also in parts."""

    def __init__(self, config: PPOConfig):
        super().__init__()
        self._config = config

    def submit(
        self,
        prompts: Any,
        *,
        version: int | None,
        max_new_tokens: int | None = None,
        num_prompts: int | None = None,
    ) -> PendingResponses:
        width, parts = self._config.data.max_response_length, prompts
        if isinstance(prompts, DataProto):
            parts = TimedParts(self._group, prompts, has_versions=self._config.trainer.partial_rollout)
        if num_prompts is not None:
            return TimedRound(parts, num_prompts, width, version=version)
        return parts.extended(max_new_tokens or width, version=version)


@dataclass(frozen=True)
class TimedParts:
    """Responses that are generated part by part.

    Attributes:
        group: The rollout's stand-ins.
        prompts: With seeds.
        has_versions: Whether the batch has the weights' version of every token.
        parts: Future of each part, and the columns up to which it goes.
    """

    group: Any
    prompts: DataProto
    has_versions: bool
    parts: tuple[tuple[PendingResponses, int], ...] = ()

    def extended(self, columns: int, *, version: int | None) -> Self:
        """Start to generate so many more columns."""
        start = self.parts[-1][1] if self.parts else 0
        part = self.group.generate_part.submit(self.prompts, start, start + columns, weights_version=version)
        return replace(self, parts=(*self.parts, (part, start + columns)))

    def get(self) -> DataProto:
        """Wait, and return the responses so far."""
        batch, start = self.parts[-1][0].get(), 0
        versions = torch.full_like(batch.batch["response_mask"], NOT_SAMPLED)
        for part, stop in self.parts:
            versions[:, start:stop], start = part.get().batch["weights_version"][:, None], stop
        if self.has_versions:
            batch.batch["token_versions"] = versions.masked_fill(batch.batch["response_mask"] == 0, NOT_SAMPLED)
        batch.batch["weights_version"] = self.parts[0][0].get().batch["weights_version"]
        batch.batch["num_turns"] = torch.full((len(batch),), NUM_TURNS)
        return batch


class TimedRound:
    """A short round: the rest of it is submitted while `get` waits for its parts.

    Args:
        parts: Responses to all prompts, none of them begun.
        num_prompts: Prompts whose responses are wanted.
        width: Columns of a response.
        version: Of the weights.
    """

    def __init__(self, parts: TimedParts, num_prompts: int, width: int, *, version: int | None):
        self._limits, self._num_prompts, self._version = round_limits(width), num_prompts, version
        self._parts = parts.extended(self._limits[0], version=version)

    def get(self) -> DataProto:
        """Wait, and return whole responses to the chosen prompts, whose places `meta_info` has."""
        for limit, following in zip(self._limits, [*self._limits[1:], None], strict=True):
            batch = self._parts.get()
            n = len(batch) // len(self._parts.prompts)
            lengths = batch.batch["response_mask"].sum(-1).tolist()
            known = [length if length < limit or following is None else None for length in lengths]
            chosen = shortest_groups(known, n=n, num_groups=self._num_prompts, limit=limit)
            if chosen is not None:
                break
            assert following is not None, "at the last limit all lengths are known"
            self._parts = self._parts.extended(following - limit, version=self._version)
        rows = (torch.tensor(chosen)[:, None] * n + torch.arange(n)).reshape(-1)
        result = batch.select_idxs(rows)
        result.meta_info[CHOSEN_GROUPS] = chosen
        return result
