"""Short rounds: agent loops generate until enough groups are complete, and the other loops end.

A short round of tail batching (RollPacker, arXiv 2509.21009) ends when enough groups are complete. Here "first" counts
tokens and not seconds: a round trains on the groups whose longest response is the shortest. All responses grow together
from limit to limit. An open response is longer than the limit, so its group comes after all groups that are complete at
the limit. As soon as these are enough, the choice is the one that whole responses would give.

Completion by the clock depends on the load of the machines, and a step that runs again would choose other groups. A
choice by tokens depends on seeds and weights alone. Nothing needs to be recorded to repeat it.

Rows wait at each limit, as they do with partial rollouts. So no request is open at a replica when the other loops end,
and none has to be aborted there. Runs in the driver. Shapes: S rows, n adjacent ones per group, G groups.
"""

from collections.abc import Sequence

import torch

from hybridrl.data_plane.chunking import even_bounds
from hybridrl.data_plane.meta_info import CHOSEN_GROUPS
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop.base import AgentLoopOutput
from hybridrl.serving.agent_loop.batch import AgentBatch
from hybridrl.serving.router import ReplicaRouter

NUM_LIMITS = 16  # a round is at most a sixteenth of the response length longer than it must be


def round_limits(max_tokens: int) -> list[int]:
    """Return the numbers of tokens at which a round looks for complete groups; the last one is `max_tokens`."""
    return [stop for _, stop in even_bounds(max_tokens, min(NUM_LIMITS, max_tokens))]


def shortest_groups(lengths_S: Sequence[int | None], *, n: int, num_groups: int, limit: int) -> list[int] | None:
    """Return the places of the groups whose longest response is the shortest, ascending; None while they are unknown.

    Of equally long groups, the first ones are chosen.

    Args:
        lengths_S: Tokens of the responses that have ended, None for those that may continue beyond the limit.
        n: Responses per group.
        num_groups: How many to choose.
        limit: Tokens up to which all lengths are known.
    """
    longest = []
    for start in range(0, len(lengths_S), n):
        known = [length for length in lengths_S[start : start + n] if length is not None and length <= limit]
        if len(known) == n:
            longest.append((max(known), start // n))
    return sorted(place for _, place in sorted(longest)[:num_groups]) if len(longest) >= num_groups else None


async def generate_short_round(
    batch: AgentBatch, router: ReplicaRouter, *, num_groups: int, max_new_tokens: int, timeout_s: float
) -> None:
    """Return when enough groups of a new batch are complete (`batch.chosen`) and the other loops have ended.

    Consumes: The batch's rows, limit by limit.
    Waits for: The rows to end or to wait at the limit, up to `timeout_s` seconds for each limit.
    Unblocked by: `AgentBatch.advance`.

    Args:
        batch: New rows, n adjacent ones per group.
        router: Answers their requests.
        num_groups: Groups that are wanted.
        max_new_tokens: Most tokens of a response.
        timeout_s: Deadline of each limit.

    Raises:
        CallTimeout: See `AgentBatch.advance`.
    """
    try:
        for limit in round_limits(max_new_tokens):
            await batch.advance(router, limit, timeout_s=timeout_s)
            batch.chosen = shortest_groups(batch.lengths, n=batch.n, num_groups=num_groups, limit=limit)
            if batch.chosen is not None:
                return
    finally:
        await batch.cancel()


def chosen_responses(batch: AgentBatch) -> tuple[DataProto, list[AgentLoopOutput]]:
    """Return the chosen prompts, with their places in `meta_info[CHOSEN_GROUPS]`, and their outputs."""
    assert batch.chosen is not None, "at the last limit all loops have ended"
    prompts = batch.prompts.select_idxs(torch.tensor(batch.chosen))
    prompts.meta_info = prompts.meta_info | {CHOSEN_GROUPS: batch.chosen}
    return prompts, batch.outputs_of(group * batch.n + i for group in batch.chosen for i in range(batch.n))
