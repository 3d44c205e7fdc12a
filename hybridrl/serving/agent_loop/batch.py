"""Generate all responses of one batch concurrently, each by its loop, up to a limit of tokens that may be raised later.

A limit below `data.max_response_length` is used by partial rollouts. A response with that many tokens waits in the
middle of a turn, the weights change, and it continues. Of an agent with several conversations, each has the limit.
Each row records the policy's turns so that a run can resume from a checkpoint. The loop then runs again from its start
and gets the recorded turns without any request. Rows that had ended keep their outputs.

Which weights sample a token depends on its place in its conversation alone, as long as a loop has one request at a
time. A loop with concurrent requests may send one when the batch has reached its limit. It is served at once, perhaps
with younger weights. Rows of a loop with `has_own_pace` have no limit: only the last call waits for them.

Runs in the driver process, on the router's event loop. `AgentLoopManager` creates it, and the trainer's thread waits in
`AgentBatch.get`.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.failure_policy import Budgets, Failure, FailureKind
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop import failures
from hybridrl.serving.agent_loop.base import AgentLoopOutput
from hybridrl.serving.agent_loop.episode_clock import EpisodeClock
from hybridrl.serving.agent_loop.recorded_row import RecordedRow
from hybridrl.serving.continuation import continued, join_chunks, with_reason
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.service import QueuedWork
from hybridrl.workers.rollout.requests import Request, TokenOutput

logger = logging.getLogger(__name__)

# A row with its request and client, whether a loop has failed on it -> coroutine of its AgentLoopOutput
LoopRunner = Callable[[dict[str, Any], bool], Any]

# Before a row with a request that waits counts as settled: for its loop, which got an answer, to send another request.
SETTLE_S = 0.5


@dataclass
class RowClient:
    """The policy as the loop of one row sees it. Its turns are whole, however often a limit or a push interrupts them.

    Attributes:
        has_own_pace: The row has no limit.
        turns: Turns so far by their keys, recorded ones included; one with reason "pause" is continued.
        num_open: Turns that the loop waits for.
        num_at_limit: Those of them that wait for a higher limit.
        clock: Its deadlines, which stand still while a request waits for weights.
    """

    batch: "AgentBatch"
    has_own_pace: bool = False
    turns: dict[str, TokenOutput] = field(default_factory=dict)
    is_finished: bool = False
    num_open: int = 0
    num_at_limit: int = 0
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    _occurrences: Counter[str] = field(default_factory=Counter)
    _conversations: set[str] = field(default_factory=set)
    _num_requests: int = 0  # to the router
    _num_answered: int = 0  # in the last `SETTLE_S` seconds, while other requests wait

    @property
    def is_settled(self) -> bool:
        """Whether nothing more happens in this row until the limit is raised."""
        if self.is_finished or (self.has_own_pace and not self.batch.is_at_last_limit):
            return True
        return 0 < self.num_open == self.num_at_limit and not self._num_answered

    def finish(self) -> None:
        """End the row: no replica has its conversations any more."""
        self.is_finished = True
        for conversation in self._conversations:
            self.batch.router.table.end_conversation(conversation)

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        """Return a whole turn.

        Consumes: A recorded turn, or the router's answers to the parts of the turn.
        Waits for: The router; a higher limit where the turn has reached this one; the end of a push.
        Unblocked by: The replica's pump; the next `AgentBatch.advance`; `ReplicaRouter.resume`.
        """
        key = self._key_of(request)
        self.turns.setdefault(key, TokenOutput(request.request_id, [], [], "pause", -1))
        self.num_open += 1
        try:
            while (turn := self.turns[key]).finish_reason == "pause":
                tokens_left = self._limit - request.num_before - request.num_done - len(turn.token_ids)
                if tokens_left <= 0:
                    await self._wait_for_limit()
                elif self.batch.router.is_paused:
                    with self.clock.stopped():
                        await self.batch.router.wait_until_running()
                else:
                    self.turns[key] = await self._continue_turn(turn, request, tokens_left, conversation=conversation)
            return replace(turn, request_id=request.request_id)
        finally:
            self.num_open -= 1
            if self.num_at_limit:
                self._num_answered += 1
                asyncio.get_running_loop().call_later(SETTLE_S, self._end_grace)

    def _end_grace(self) -> None:
        self._num_answered -= 1
        self.batch.check_settled()

    def _key_of(self, request: Request) -> str:
        """Return what a resumed loop's request has in common with the recorded one, whatever their order."""
        images = () if request.images is None else request.images["image_hashes"].tolist()
        content = (request.seed, request.sample, request.num_before, request.num_done, request.prompt_ids, *images)
        digest = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
        self._occurrences[digest] += 1
        return f"{digest}.{self._occurrences[digest]}"

    @property
    def _limit(self) -> int:
        return self.batch.last_limit if self.has_own_pace else self.batch.limit

    async def _continue_turn(
        self, turn: TokenOutput, request: Request, tokens_left: int, *, conversation: str | None
    ) -> TokenOutput:
        """Return the turn with up to `tokens_left` more tokens."""
        left = request.sampling.max_new_tokens - len(turn.token_ids)
        self._num_requests += 1
        conversation = conversation or request.request_id
        self._conversations.add(conversation)
        part = continued(
            request,
            turn.token_ids,
            request_id=f"{request.request_id}@{self._num_requests}",
            max_new_tokens=min(left, tokens_left),
        )
        output = await self.batch.router.generate(part, conversation=conversation)
        whole = join_chunks(request.request_id, [turn, output])
        return with_reason(whole, has_all=len(output.token_ids) == left)

    async def _wait_for_limit(self) -> None:
        self.num_at_limit += 1
        try:
            with self.clock.stopped():
                await self.batch.wait_for_raised_limit()
        finally:
            self.num_at_limit -= 1


class AgentBatch:
    """Tasks and turns of one batch, and the future of its columns (`PendingResponses`).

    Use it on the router's event loop, except for `get`, and for `outputs`, `clients` and `rows` while nothing runs.

    Args:
        prompts: The batch.
        rows: Columns of each row, with its `request`; n adjacent rows per prompt.
        run_loop: Generates the response of a row.
        last_limit: Most tokens of a response; at this limit all rows end.
        has_own_pace: Whether a row has no limit.
        recorded: What a checkpoint has of each row.
        collect: Returns the columns of this batch as far as it was generated. None: nobody calls `get`.

    Attributes:
        n: Rows per prompt.
        limit: Of the running call.
        requested_limit: Of the last submitted call.
        work: The last submitted call; None before.
        chosen: Places of the complete groups of a short round, ascending; None otherwise.
    """

    def __init__(
        self,
        prompts: DataProto,
        rows: list[dict[str, Any]],
        run_loop: LoopRunner,
        *,
        last_limit: int,
        has_own_pace: Callable[[Mapping[str, Any]], bool] = lambda row: False,
        recorded: list[RecordedRow] | None = None,
        collect: Callable[["AgentBatch"], DataProto] | None = None,
    ):
        self.prompts, self.rows, self.last_limit = prompts, rows, last_limit
        self.n = len(rows) // len(prompts) if len(prompts) else 1
        self.limit = self.requested_limit = 0
        self.work: QueuedWork | None = None
        self.chosen: list[int] | None = None
        self.router: ReplicaRouter
        self._collect = collect
        records = recorded or [RecordedRow() for _ in rows]
        self.clients = [
            RowClient(self, has_own_pace(row), record.turns) for row, record in zip(rows, records, strict=True)
        ]
        self._ended = [record.output for record in records]
        self._run_loop = run_loop
        self._tasks: list[asyncio.Task[AgentLoopOutput]] = []
        self._raised = asyncio.Event()
        self._settled = asyncio.Event()
        self._budgets = Budgets()  # of each row
        self._logged: set[str] = set()

    def get(self) -> DataProto:
        """Wait for what was submitted last, and return the batch that `generate_sequences` would return.

        Called in the trainer's thread. Where responses will be continued, the batch has the prompts of all rows and the
        columns of `RecordedRow`.

        Raises:
            CancelledError: The service was closed first.
        """
        assert self.work is not None and self._collect is not None  # the manager submits what it has created
        self.work.wait()
        return self._collect(self)

    async def advance(self, router: ReplicaRouter, limit: int, *, timeout_s: float) -> None:
        """Return when every response has ended or has `limit` tokens.

        A loop that fails is tried again, and its sample is left out if that does not help (`failures`). The first bug
        of a loop ends all others, and its exception is raised.

        Consumes: The rows, each in a task that lives through all calls.
        Waits for: Every row to end or to wait for a higher limit, up to `timeout_s`.
        Unblocked by: The last row that does (`check_settled`), and the first one with a bug.

        Raises:
            CallTimeout: Not done within `timeout_s`; names the unfinished rows.
        """
        self.router, self.limit = router, limit
        raised, self._raised = self._raised, asyncio.Event()
        self._settled.clear()
        raised.set()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run_row(number)) for number in range(len(self.rows))]
        try:
            await asyncio.sleep(0)  # let rows that waited for the limit start again
            self.check_settled()
            await asyncio.wait_for(self._settled.wait(), timeout_s)
            for task in self._tasks:
                if task.done():
                    task.result()
        except TimeoutError as error:
            self._cancel_tasks()
            late = [
                row["request"].request_id
                for row, client in zip(self.rows, self.clients, strict=True)
                if not client.is_settled
            ]
            raise CallTimeout(
                f"{len(late)} of {len(self.rows)} agent loops did not end within {timeout_s:g} s "
                f"({', '.join(late[:5])}); if they are slow and not stuck, raise trainer.call_timeout_s"
            ) from error
        except BaseException:
            self._cancel_tasks()
            raise

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run_row(self, number: int) -> AgentLoopOutput:
        """Return the response to a row: the task of the row.

        Consumes: The row; turns and output that a checkpoint has of it.
        Waits for: Its loop, which waits in `RowClient.generate` or for tools, programs and environments.
        Unblocked by: What the loop waits for; the loop's deadline; `cancel`, and `advance` when it fails.
        """
        try:
            return await self._try_row(number)
        except BaseException:
            self._settled.set()
            raise
        finally:
            self.clients[number].finish()
            self.check_settled()

    async def _try_row(self, number: int) -> AgentLoopOutput:
        """Return the response to a row, without tokens if it is left out."""
        if (ended := self._ended[number]) is not None:
            return ended
        row, causes = self.rows[number], Counter[str]()
        while True:
            client = self.clients[number]
            try:
                output = await self._run_loop(row | {"client": client, "episode_clock": client.clock}, bool(causes))
                break
            except Exception as error:
                sort = failures.sort_failure(error)
                if sort is failures.FailureSort.BUG:
                    raise
                causes[failures.cause_of(error)] += 1
                is_tried_again = self._decide(row["request"].request_id, error, sort)
            if not is_tried_again:
                output = failures.left_out_output(row["request"])
                break
            await asyncio.sleep(failures.BACK_OFF_S * 2 ** (causes.total() - 1))
            # Requests that the loop has left open go to the old client.
            self.clients[number] = RowClient(self, client.has_own_pace)
        counts = {f"{failures.FAILURE}{cause}": float(times) for cause, times in causes.items()}
        return replace(output, counts=output.counts | counts)

    def _decide(self, row: str, error: Exception, sort: failures.FailureSort) -> bool:
        """Return whether a loop is tried again. Logs the first failure of each cause."""
        what = f"the agent loop of row {row} failed ({type(error).__name__}: {error})"
        cause = failures.cause_of(error)
        failure = Failure(FailureKind.AGENT_LOOP_FAILED, what, subject=row, target="the row")
        decision = None if sort is failures.FailureSort.DATA else self._budgets.spend(failure)
        level = logging.DEBUG if cause in self._logged else logging.WARNING
        self._logged.add(cause)
        text = f"{what}; the row is at fault, so the sample is left out" if decision is None else str(decision)
        logger.log(level, "%s. Further failures of this kind in the batch are only counted", text)
        return decision is not None and decision.is_granted

    async def wait_for_raised_limit(self) -> None:
        """Return when `advance` was called again."""
        raised = self._raised
        self.check_settled()
        await raised.wait()

    def check_settled(self) -> None:
        """Let `advance` return if nothing more happens in any row until the limit is raised."""
        if all(client.is_settled for client in self.clients):
            self._settled.set()

    def records(self) -> list[RecordedRow]:
        """Return what a resumed run needs of each row. May be called in any thread, while rows with own pace work."""
        outputs = [task.result() if _has_result(task) else None for task in self._tasks]
        return [RecordedRow(dict(client.turns), output) for client, output in zip(self.clients, outputs, strict=True)]

    @property
    def is_at_last_limit(self) -> bool:
        return self.limit >= self.last_limit

    @property
    def was_aborted(self) -> bool:
        """Whether loops were cancelled together with their event loop. Their turns are still recorded."""
        return any(task.cancelled() for task in self._tasks)

    @property
    def is_complete(self) -> bool:
        """Whether every response ended by itself."""
        return all(client.is_finished for client in self.clients) and not self.was_aborted

    @property
    def lengths(self) -> list[int | None]:
        """Tokens of the responses that have ended, None for the others."""
        return [len(task.result().response_ids) if task.done() else None for task in self._tasks]

    async def cancel(self) -> None:
        """End all loops that have not ended, and return when they have."""
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def outputs(self) -> list[AgentLoopOutput]:
        return [task.result() for task in self._tasks]

    def outputs_of(self, rows: Iterable[int]) -> list[AgentLoopOutput]:
        """Return the outputs of rows that have ended."""
        return [task.result() for task in (self._tasks[row] for row in rows)]


def _has_result(task: asyncio.Task[AgentLoopOutput]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
