"""`ShortRound`: batched calls of the rollout (rollout.mode=sync) that end when enough groups are complete.

`workers/rollout/short_round.py` says which groups these are. The calls are those of partial rollouts: each one
generates up to the next limit, with the same weights.
"""

from typing import Any

import torch

from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.policy.rollout_pipeline import shards_of_groups
from hybridrl.workers.rollout.short_round import CHOSEN, round_limits, shortest_groups


class ShortRound:
    """The responses of a short round, a `PendingResponses`. Later chunks are submitted while `get` waits.

    Args:
        group: Worker group of the rollout.
        prompts: As for `generate_sequences`, with seeds.
        num_prompts: Prompts whose responses are wanted.
        max_new_tokens: Most tokens of a response, R.
        version: Version of the weights.
    """

    def __init__(self, group: Any, prompts: DataProto, num_prompts: int, max_new_tokens: int, *, version: int | None):
        self._group, self._version = group, version
        self._num_started, self._num_prompts = len(prompts), num_prompts
        self._limits = round_limits(max_new_tokens)
        self._chunk = group.begin_sequences.submit(prompts, self._limits[0], weights_version=version)
        self._result: DataProto | None = None

    def get(self) -> DataProto:
        """Wait, and return the whole responses to the chosen prompts; `meta_info[CHOSEN]` has the prompts' places."""
        if self._result is None:
            self._result = self._generate()
        return self._result

    def _generate(self) -> DataProto:
        chosen, done = None, 0
        for limit in self._limits:
            if done:
                self._continue(self._chunk, limit - done)
            batch, done = self._chunk.get(), limit
            n = len(batch) // self._num_started
            lengths = _lengths(batch, is_last=limit == self._limits[-1])
            chosen = shortest_groups(lengths, n=n, num_groups=self._num_prompts, limit=limit)
            if chosen is not None:
                break
        assert chosen is not None, "at the last limit all lengths are known"
        rows = (torch.tensor(chosen)[:, None] * n + torch.arange(n)).reshape(-1)
        result = self._padded(batch.select_idxs(rows), self._limits[-1] - done)
        result.batch.pop("token_versions")
        result.meta_info[CHOSEN] = chosen
        return result

    def _continue(self, chunk: Any, max_new_tokens: int) -> None:
        self._chunk = self._group.continue_sequences.submit(chunk, max_new_tokens, weights_version=self._version)

    def _padded(self, batch: DataProto, width: int) -> DataProto:
        """Return complete responses with this many more columns: continuing them adds padding alone."""
        if not width:
            return batch
        self._continue(shards_of_groups(batch, num_groups=self._num_prompts, num_shards=self._group.world_size), width)
        return self._chunk.get()


def _lengths(batch: DataProto, *, is_last: bool) -> list[int | None]:
    """Return the lengths of responses that have ended, and None for those that fill their columns."""
    mask = batch.batch["response_mask"]
    ended = (mask[:, -1] == 0) | is_last
    return [
        length if has_ended else None for length, has_ended in zip(mask.sum(-1).tolist(), ended.tolist(), strict=True)
    ]
