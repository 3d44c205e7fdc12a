"""Batches of agent loops with a limit of tokens that is raised: who waits, for whom, and what a checkpoint keeps."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from hybridrl.errors import AgentFailed
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop import batch as batch_module
from hybridrl.serving.agent_loop.base import AgentLoop, AgentLoopContext, AgentLoopOutput
from hybridrl.serving.agent_loop.batch import AgentBatch
from hybridrl.serving.agent_loop.episode_clock import EpisodeClock
from hybridrl.serving.agent_loop.recorded_row import pop_records, to_columns
from hybridrl.serving.concurrency_limit import slots
from hybridrl.serving.routing_table import ReplicaState, RoutingTable
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

LENGTH = 8


class Policy:
    """Samples the tokens 100, 101, ... with the present version of the weights."""

    def __init__(self) -> None:
        self.version, self.requests = 1, list[Request]()
        self.table = RoutingTable(1)
        self.table.move(0, ReplicaState.SERVING)
        self._running = asyncio.Event()
        self._running.set()

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def wait_until_running(self) -> None:
        await self._running.wait()

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        await self._running.wait()
        self.requests.append(request)
        self.table.assign(request.request_id, request.prompt_ids, conversation=conversation)
        await asyncio.sleep(0)
        self.table.finish(request.request_id)
        tokens = [100 + request.num_done + i for i in range(request.sampling.max_new_tokens)]
        return TokenOutput(request.request_id, tokens, [-1.0] * len(tokens), "length", self.version)


class Loop(AgentLoop):
    """Calls `play(response, row)`."""

    def __init__(self, play: Callable, timeout_s: float = 60.0):
        super().__init__(AgentLoopContext(None, LENGTH, agent_timeout_s=timeout_s))
        self.play = play

    async def run(self, sampling_params, **row):
        response = self.respond(row)
        await self.play(response, row)
        return response.output()


async def two_turns(response, row) -> None:
    await response.sample(SamplingParams(3))
    response.observe([9])
    await response.sample(SamplingParams(LENGTH))


def new_batch(play: Callable, *, num_rows: int = 1, timeout_s: float = 60.0, **more) -> AgentBatch:
    loop = Loop(play, timeout_s)

    async def run_loop(row: dict, is_retry: bool) -> AgentLoopOutput:
        return await loop.run_in_time(SamplingParams(LENGTH), **row)

    rows = [{"request": Request(f"r{i}", (1, 2), SamplingParams(LENGTH), i)} for i in range(num_rows)]
    return AgentBatch(DataProto(), rows, run_loop, last_limit=LENGTH, **more)


async def advance(batch: AgentBatch, policy: Policy, limit: int, *, version: int) -> None:
    policy.version = version
    await batch.advance(policy, limit, timeout_s=60)


def test_a_turn_waits_at_the_limit_and_goes_on_with_the_next_weights():
    async def check() -> None:
        batch, policy = new_batch(two_turns), Policy()
        await advance(batch, policy, 5, version=1)
        assert not batch.is_complete
        await advance(batch, policy, LENGTH, version=2)
        [output] = batch.outputs
        assert output.token_versions == [1, 1, 1, -1, 1, 2, 2, 2] and output.version == 1
        assert output.response_ids == [100, 101, 102, 9, 104, 105, 106, 107]

    asyncio.run(check())


def test_the_router_forgets_the_conversations_of_a_finished_row():
    async def check() -> None:
        batch, policy = new_batch(two_turns, num_rows=3), Policy()
        await advance(batch, policy, 5, version=1)
        assert sorted(policy.table._conversations) == ["r0", "r1", "r2"]
        await advance(batch, policy, LENGTH, version=2)
        assert batch.is_complete and not policy.table._conversations

    asyncio.run(check())


def test_what_came_before_in_the_conversation_counts_towards_the_limit():
    async def play(response, row) -> None:
        request = replace(row["request"], num_before=4, sampling=SamplingParams(4))
        output = await row["client"].generate(request)
        assert output.token_versions == [1, 2, 2, 2]

    async def check() -> None:
        batch, policy = new_batch(play), Policy()
        await advance(batch, policy, 5, version=1)
        await advance(batch, policy, LENGTH, version=2)
        assert batch.is_complete

    asyncio.run(check())


def test_a_deadline_stands_still_while_a_request_waits_for_weights_or_a_push():
    async def check() -> None:
        batch, policy = new_batch(two_turns, timeout_s=0.3), Policy()
        await advance(batch, policy, 5, version=1)
        await asyncio.sleep(0.4)  # at the limit
        policy.pause()
        later = asyncio.get_running_loop().call_later(0.4, policy.resume)  # in a push
        await advance(batch, policy, LENGTH, version=2)
        assert later.when() <= asyncio.get_running_loop().time() and not batch.outputs[0].is_left_out

    asyncio.run(check())


def test_a_deadline_counts_the_time_before_and_after_a_wait(monkeypatch):
    monkeypatch.setattr("hybridrl.serving.agent_loop.failures.BACK_OFF_S", 0.0)

    async def hangs_after_a_wait(response, row) -> None:
        await two_turns(response, row)
        await asyncio.Event().wait()

    async def check() -> None:
        batch, policy = new_batch(hangs_after_a_wait, timeout_s=0.05), Policy()
        await advance(batch, policy, 5, version=1)
        await advance(batch, policy, LENGTH, version=2)
        assert batch.outputs[0].is_left_out and batch.outputs[0].counts["failures/timeout"] == 3

    asyncio.run(check())


def test_an_episode_that_waits_gives_its_slot_to_the_next_one():
    async def check() -> None:
        async def play(response, row) -> None:
            async with EpisodeClock.of(row).hold(slots(1, of="row")):
                await two_turns(response, row)

        batch, policy = new_batch(play, num_rows=3), Policy()
        await advance(batch, policy, 5, version=1)  # hangs if the first row keeps the slot
        await advance(batch, policy, LENGTH, version=2)
        assert [output.token_versions[4:6] for output in batch.outputs] == [[1, 2]] * 3
        await asyncio.wait_for(slots(1, of="row").acquire(), timeout=5)
        with pytest.raises(TimeoutError):  # no slot was given back twice
            await asyncio.wait_for(slots(1, of="row").acquire(), timeout=0.05)

    asyncio.run(check())


def test_a_row_with_its_own_pace_is_waited_for_by_the_last_call_only():
    async def check() -> None:
        claimed = asyncio.Event()

        async def play(response, row) -> None:
            await claimed.wait()
            await two_turns(response, row)

        batch, policy = new_batch(play, has_own_pace=lambda row: True), Policy()
        await advance(batch, policy, 5, version=1)  # nobody has claimed the row
        claimed.set()
        await advance(batch, policy, LENGTH, version=2)
        assert batch.outputs[0].token_versions == [2, 2, 2, -1, 2, 2, 2, 2]

    asyncio.run(check())


def test_a_concurrent_request_after_the_limit_is_served_and_ends_nothing(monkeypatch):
    monkeypatch.setattr(batch_module, "SETTLE_S", 0.0)

    async def check() -> None:
        gate = asyncio.Event()

        async def play(response, row) -> None:
            client, request = row["client"], replace(row["request"], sampling=SamplingParams(4))

            async def helper() -> TokenOutput:
                await gate.wait()
                return await client.generate(replace(request, prompt_ids=(7, 7)))

            outputs = await asyncio.gather(client.generate(replace(request, num_before=3)), helper())
            response.ids += outputs[0].token_ids + outputs[1].token_ids
            response.mask, response.log_probs = [1] * 8, [-1.0] * 8
            response.token_versions = outputs[0].token_versions + outputs[1].token_versions

        batch, policy = new_batch(play), Policy()
        await advance(batch, policy, 5, version=1)
        gate.set()
        await asyncio.sleep(0.01)
        await advance(batch, policy, LENGTH, version=2)
        assert batch.outputs[0].token_versions == [1, 1, 2, 2, 1, 1, 1, 1]

    asyncio.run(check())


def test_a_resumed_batch_repeats_recorded_turns_in_any_order_and_keeps_what_has_ended():
    async def concurrent(response, row) -> None:
        client, request = row["client"], row["request"]
        prompts = [(5, 5), (6, 6)] if concurrent.is_first else [(6, 6), (5, 5)]
        answers = await asyncio.gather(*(client.generate(replace(request, prompt_ids=ids)) for ids in prompts))
        concurrent.versions |= {ids: one.token_versions for ids, one in zip(prompts, answers, strict=True)}

    concurrent.is_first, concurrent.versions = True, {}
    starts = Counter()

    async def play(response, row) -> None:
        starts[row["request"].seed] += 1
        if row["request"].seed:
            await response.sample(SamplingParams(2))
        else:
            await concurrent(response, row)

    async def check() -> None:
        batch, policy = new_batch(play, num_rows=2), Policy()
        await advance(batch, policy, 3, version=1)
        columns = to_columns(batch.records())
        await batch.cancel()
        concurrent.is_first = False
        resumed = new_batch(play, num_rows=2, recorded=pop_records(columns))
        policy.requests.clear()
        await advance(resumed, policy, LENGTH, version=2)
        assert not columns and starts == {0: 2, 1: 1}
        assert resumed.outputs[1] == batch.outputs_of([1])[0]
        assert concurrent.versions == {(5, 5): [1] * 3 + [2] * 5, (6, 6): [1] * 3 + [2] * 5}
        assert [request.sampling.max_new_tokens for request in policy.requests] == [5, 5]

    asyncio.run(check())


def test_records_keep_branches_rewards_and_versions():
    branch = AgentLoopOutput([1], [2], [1], [-0.1], version=4, token_versions=[4], reward=0.25)
    output = AgentLoopOutput([1], [2, 3], [1, 1], [-0.1, -1 / 3], counts={"x": 1.0}, branches=[branch])
    [record] = pop_records(to_columns([batch_module.RecordedRow({}, output)]))
    assert record.output == output and record.turns == {}


def test_a_limit_that_has_passed_raises_as_without_waits():
    async def check() -> None:
        loop = Loop(two_turns, timeout_s=0.01)
        with pytest.raises(AgentFailed, match="Loop did not end within 0.01 s"):
            async with loop.time_limit(EpisodeClock()):
                await asyncio.Event().wait()

    asyncio.run(check())
