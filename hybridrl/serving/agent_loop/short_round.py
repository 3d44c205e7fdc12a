"""A short round of agent loops: generate until enough groups are complete, and end the other loops.

`workers/rollout/short_round.py` says which groups these are. Rows wait at each limit, as they do with partial rollouts.
So no request is open at a replica when the other loops end, and none has to be aborted there.
"""

from hybridrl.serving.agent_loop.batch import AgentBatch
from hybridrl.serving.continuation import PolicyClient
from hybridrl.workers.rollout.short_round import round_limits, shortest_groups


async def advance_to_groups(
    batch: AgentBatch, router: PolicyClient, max_new_tokens: int, *, n: int, num_groups: int, timeout_s: float
) -> list[int]:
    """Return the places of the groups that are complete after the fewest tokens, ascending. The other loops end.

    Args:
        batch: New rows, n adjacent ones per group.
        router: Answers the requests.
        max_new_tokens: Most tokens of a response.
        n: Responses per group.
        num_groups: Groups that are wanted.
        timeout_s: Deadline of each limit.

    Raises:
        CallTimeout: See `AgentBatch.advance`.
    """
    chosen = None
    try:
        for limit in round_limits(max_new_tokens):
            await batch.advance(router, limit, timeout_s=timeout_s)
            chosen = shortest_groups(batch.lengths, n=n, num_groups=num_groups, limit=limit)
            if chosen is not None:
                break
    finally:
        await batch.cancel()
    assert chosen is not None, "at the last limit all loops have ended"
    return chosen
