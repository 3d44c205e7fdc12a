"""`AgentBatch`: the responses of one batch while they are made, all at once, each by its loop, up to a limit that may
be raised later.

A limit below `data.max_response_length` is for partial rollouts: a response that has so many tokens waits in the middle
of what the policy says, the weights change, and it goes on. What the policy has said is written down (`said`), so that
a run which continues from a checkpoint can lead every loop back to where it was: the loop runs again from its beginning
and is told the same, without asking anybody.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.serving.agent_loop.base import AgentLoopOutput
from hybridrl.serving.continuation import PolicyClient, joined, pieces
from hybridrl.workers.rollout.requests import Request, TokenOutput

RunLoop = Callable[[dict[str, Any]], Any]  # a row, with its request and client -> coroutine of its AgentLoopOutput


@dataclass
class RowPolicy:
    """The policy as the loop of one row sees it. said: its turns so far; one with reason "pause" goes on."""

    batch: "AgentBatch"
    said: list[TokenOutput] = field(default_factory=list)
    is_over: bool = False
    num_open: int = 0
    num_waiting: int = 0
    _num_turns: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing happens in this row before the limit is raised."""
        return self.is_over or 0 < self.num_open == self.num_waiting

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        number, most = self._num_turns, request.sampling.max_new_tokens
        self._num_turns += 1
        if number == len(self.said):
            self.said.append(TokenOutput(request.request_id, [], [], "pause", -1))
        self.num_open += 1
        try:
            while (turn := self.said[number]).finish_reason == "pause":
                room = self.batch.limit - request.num_done - len(turn.token_ids)
                if room <= 0:
                    await self._wait_for_more()
                    continue
                left = most - len(turn.token_ids)
                self.said[number] = await self._more(
                    turn, request, min(left, room), is_last=left <= room, conversation=conversation
                )
            return turn
        finally:
            self.num_open -= 1

    async def _more(
        self, turn: TokenOutput, request: Request, width: int, *, is_last: bool, conversation: str | None
    ) -> TokenOutput:
        """The turn with up to `width` more tokens. is_last: it may not have more than that."""
        done = len(turn.token_ids)
        rest = replace(
            request,
            request_id=f"{request.request_id}@{done}",
            prompt_ids=(*request.prompt_ids, *turn.token_ids),
            sampling=replace(request.sampling, max_new_tokens=width),
            num_done=request.num_done + done,
        )
        parts = [
            piece async for piece in pieces(self.batch.router, rest, conversation=conversation or request.request_id)
        ]
        whole = joined(request.request_id, [turn, *parts])
        return replace(whole, finish_reason="pause") if whole.finish_reason == "length" and not is_last else whole

    async def _wait_for_more(self) -> None:
        self.num_waiting += 1
        try:
            await self.batch.limit_raised()
        finally:
            self.num_waiting -= 1


class AgentBatch:
    """rows: with a `request` each. run_loop: makes the response of a row. said: of each row, from a checkpoint.

    To be used in the router's event loop, except `outputs`, `said` and `rows` when nothing is under way.
    """

    def __init__(self, rows: list[dict[str, Any]], run_loop: RunLoop, *, said: list[list[TokenOutput]] | None = None):
        self.rows, self.limit = rows, 0
        self.planned = 0  # the limit that was asked for last
        self.router: PolicyClient
        self.policies = [RowPolicy(self, turns) for turns in said or [[] for _ in rows]]
        self._run_loop = run_loop
        self._tasks: list[asyncio.Task[AgentLoopOutput]] = []
        self._raised = asyncio.Event()
        self._settled = asyncio.Event()

    async def advance(self, router: PolicyClient, limit: int, *, timeout_s: float) -> None:
        """Return when every response has ended or has `limit` tokens. The first loop that fails ends all, and its
        exception is raised.

        timeout_s: CallTimeout, naming the rows that are not there, if it takes longer.
        """
        self.router, self.limit = router, limit
        raised, self._raised = self._raised, asyncio.Event()
        self._settled.clear()
        raised.set()
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._one(row, policy))
                for row, policy in zip(self.rows, self.policies, strict=True)
            ]
        try:
            await asyncio.sleep(0)  # who waited for the limit finds it raised
            self._look()
            await asyncio.wait_for(self._settled.wait(), timeout_s)
            for task in self._tasks:
                if task.done():
                    task.result()
        except TimeoutError as error:
            late = [
                row["request"].request_id
                for row, policy in zip(self.rows, self.policies, strict=True)
                if not policy.is_settled
            ]
            raise CallTimeout(
                f"{len(late)} of {len(self.rows)} agent loops did not end within {timeout_s:g} s "
                f"({', '.join(late[:5])}); if they are "
                "slow and not stuck, raise trainer.call_timeout_s"
            ) from error
        finally:
            if not all(policy.is_settled for policy in self.policies):
                for task in self._tasks:
                    task.cancel()

    async def _one(self, row: dict[str, Any], policy: RowPolicy) -> AgentLoopOutput:
        try:
            return await self._run_loop(row | {"client": policy})
        except BaseException:
            self._settled.set()
            raise
        finally:
            policy.is_over = True
            self._look()

    async def limit_raised(self) -> None:
        """Return when `advance` was called again."""
        raised = self._raised
        self._look()
        await raised.wait()

    def _look(self) -> None:
        if all(policy.is_settled for policy in self.policies):
            self._settled.set()

    @property
    def was_ended(self) -> bool:
        """Whether loops were ended in the middle, with the event loop that they ran on; what they said is known."""
        return any(task.cancelled() for task in self._tasks)

    @property
    def is_whole(self) -> bool:
        """Whether every response has come to its own end."""
        return all(policy.is_over for policy in self.policies) and not self.was_ended

    @property
    def outputs(self) -> list[AgentLoopOutput]:
        return [task.result() for task in self._tasks]


def write_down(turns: list[TokenOutput]) -> str:
    """Return what the policy said in a row as JSON; `read` gives it back, to the bit."""
    return json.dumps([[t.request_id, t.token_ids, t.log_probs, t.finish_reason, t.version, t.mixed] for t in turns])


def read(text: str) -> list[TokenOutput]:
    return [TokenOutput(*rest, mixed=tuple(mixed)) for *rest, mixed in json.loads(text)]
