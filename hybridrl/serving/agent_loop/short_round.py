"""`ShortRound`: agent loops generate until enough groups are complete, and the other loops end.

`workers/rollout/short_round.py` says which groups these are. Rows wait at each limit, as they do with partial rollouts.
So no request is open at a replica when the other loops end, and none has to be aborted there.
"""

from dataclasses import dataclass

import torch

from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop.base import AgentLoopOutput
from hybridrl.serving.agent_loop.batch import AgentBatch
from hybridrl.serving.router import ReplicaRouter
from hybridrl.workers.rollout.short_round import CHOSEN, round_limits, shortest_groups


@dataclass
class ShortRound:
    """A short round of tail batching.

    Attributes:
        batch: New rows, n adjacent ones per group.
        n: Responses per group.
        num_groups: Groups that are wanted.
        max_new_tokens: Most tokens of a response.
        timeout_s: Deadline of each limit.
        chosen: Places of the complete groups, ascending; None before the round has ended.
    """

    batch: AgentBatch
    n: int
    num_groups: int
    max_new_tokens: int
    timeout_s: float
    chosen: list[int] | None = None

    async def generate(self, router: ReplicaRouter) -> None:
        """Return when enough groups are complete and the other loops have ended.

        Raises:
            CallTimeout: See `AgentBatch.advance`.
        """
        try:
            for limit in round_limits(self.max_new_tokens):
                await self.batch.advance(router, limit, timeout_s=self.timeout_s)
                self.chosen = shortest_groups(self.batch.lengths, n=self.n, num_groups=self.num_groups, limit=limit)
                if self.chosen is not None:
                    return
        finally:
            await self.batch.cancel()

    def complete(self, prompts: DataProto) -> tuple[DataProto, list[AgentLoopOutput]]:
        """Return the chosen prompts, with their places in `meta_info[CHOSEN]`, and their outputs."""
        assert self.chosen is not None, "at the last limit all loops have ended"
        of_chosen = prompts.select_idxs(torch.tensor(self.chosen))
        of_chosen.meta_info = of_chosen.meta_info | {CHOSEN: self.chosen}
        return of_chosen, self.batch.outputs_of([group * self.n + i for group in self.chosen for i in range(self.n)])
