"""Agent loops that crash or hang are tried again, left out and counted; bugs end the batch."""

import asyncio
import math
from collections import Counter

import pytest

from hybridrl.errors import AgentFailed, CallTimeout, ConfigError, DataError, RequestFailed, WorkerLost
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop import failures
from hybridrl.serving.agent_loop.base import AgentLoop, AgentLoopContext, AgentLoopOutput
from hybridrl.serving.agent_loop.batch import AgentBatch
from hybridrl.serving.agent_loop.failures import FailureSort, leave_out_groups, sort_failure
from hybridrl.serving.routing_table import RoutingTable
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

NUM_ROWS, N = 100, 4
SAMPLING = SamplingParams(4)


class Policy:
    """Answers every request with the tokens of its row."""

    is_paused, table = False, RoutingTable(1)

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        await asyncio.sleep(0)
        return TokenOutput(request.request_id, [request.seed] * 4, [-1.0] * 4, "length", 0)


class Shaky(AgentLoop):
    """Crashes, hangs or gives up in a fifth of the rows, by the seed."""

    def __init__(self, tries: Counter, timeout_s: float):
        super().__init__(AgentLoopContext(None, 4, agent_timeout_s=timeout_s))
        self.tries = tries

    async def run(self, sampling_params, **row):
        response, seed = self.respond(row), row["request"].seed
        self.tries[seed] += 1
        await response.sample(sampling_params)
        if seed % 20 == 3:
            raise ConnectionError("the sandbox is gone")
        if seed % 20 == 7 and self.tries[seed] < 3:
            raise RuntimeError("not yet")
        if seed % 20 == 11:
            raise KeyError("the row has no answer")
        if seed % 20 == 15:
            await asyncio.Event().wait()
        return response.output()


async def generate(tries: Counter, loops: list[Shaky]) -> list[AgentLoopOutput]:
    rows = [{"request": Request(str(seed), (1, 2), SAMPLING, seed)} for seed in range(NUM_ROWS)]
    patient, hasty = Shaky(tries, math.inf), Shaky(tries, 0.05)  # a busy machine must not make the others late

    async def run_loop(row: dict, is_retry: bool) -> AgentLoopOutput:
        seed = row["request"].seed
        loop = hasty if seed % 20 == 15 else Shaky(tries, math.inf) if is_retry else patient
        loops.append(loop)
        return await loop.run_in_time(SAMPLING, **row)

    batch = AgentBatch(DataProto(), rows, run_loop, last_limit=4)
    await batch.advance(Policy(), 4, timeout_s=120)
    assert batch.is_complete
    return batch.outputs


def test_a_fifth_of_the_loops_crashes_or_hangs_and_those_left_out_are_counted(monkeypatch):
    monkeypatch.setattr(failures, "BACK_OFF_S", 0.01)
    tries, loops = Counter(), []
    outputs = asyncio.run(generate(tries, loops))
    for seed, out in enumerate(outputs):
        is_lost = seed % 20 in (3, 11, 15)
        assert out.is_left_out == is_lost and out.response_ids == ([] if is_lost else [seed] * 4)
        assert tries[seed] == {3: 3, 7: 3, 15: 3}.get(seed % 20, 1)  # a row at fault is not tried again
    counts = sum((Counter(out.counts) for out in outputs), Counter())
    assert counts == {
        "samples_left_out": 15,
        "failures/ConnectionError": 15,
        "failures/RuntimeError": 10,
        "failures/KeyError": 5,
        "failures/timeout": 15,
    }
    assert len({id(loop) for loop in loops}) == 2 + 10 + 10  # a new object for each further try
    kept = leave_out_groups(outputs, n=N, min_share=0.9)
    assert [out.is_left_out for out in kept] == [out.is_left_out for out in outputs]


def sample(name: str | None = None) -> AgentLoopOutput:
    if name is None:
        return AgentLoopOutput([1], [2], [1], [-1.0])
    return AgentLoopOutput([1], [], [], [], is_left_out=True, counts={"samples_left_out": 1.0, f"failures/{name}": 3.0})


def test_a_group_with_one_sample_is_left_out_and_too_few_groups_end_the_run():
    outputs = [sample(), sample("X"), sample("X"), sample(), sample(), sample("Y"), *[sample()] * 3]
    kept = leave_out_groups(outputs, n=3, min_share=0.6)
    assert [out.is_left_out for out in kept] == [True] * 3 + [False, False, True] + [False] * 3
    counts = sum((Counter(out.counts) for out in kept), Counter())
    assert counts == {"samples_left_out": 4, "groups_left_out": 1, "failures/X": 6, "failures/Y": 3}
    with pytest.raises(AgentFailed, match=r"2 of 3 groups .*min_group_share=0.7.*: X \(6 times\).*lower"):
        leave_out_groups(outputs, n=3, min_share=0.7)
    assert not any(out.is_left_out for out in leave_out_groups([sample()], n=1, min_share=1.0))


@pytest.mark.parametrize(
    ("error", "sort"),
    [
        (AgentFailed("x", cause="exit status 3"), FailureSort.INFRASTRUCTURE),
        (ConnectionResetError(), FailureSort.INFRASTRUCTURE),
        (TimeoutError(), FailureSort.INFRASTRUCTURE),
        (RuntimeError(), FailureSort.INFRASTRUCTURE),
        (DataError("x"), FailureSort.DATA),
        (RequestFailed("x"), FailureSort.DATA),
        (KeyError("x"), FailureSort.DATA),
        (NameError("x"), FailureSort.BUG),
        (TypeError("x"), FailureSort.BUG),
        (ConfigError("x"), FailureSort.BUG),
        (WorkerLost("rollout", 0, "serve", "x"), FailureSort.BUG),
        (CallTimeout("x"), FailureSort.BUG),
        (KeyboardInterrupt(), FailureSort.BUG),
    ],
)
def test_failures_are_sorted(error, sort):
    assert sort_failure(error) is sort


def test_a_bug_ends_the_batch_with_its_own_type():
    async def run_loop(row: dict, is_retry: bool) -> AgentLoopOutput:
        if row["request"].seed == 1:
            raise TypeError("no such argument")
        await asyncio.Event().wait()
        raise AssertionError

    batch = AgentBatch(
        DataProto(),
        [{"request": Request(str(seed), (1,), SAMPLING, seed)} for seed in range(3)],
        run_loop,
        last_limit=4,
    )
    with pytest.raises(TypeError, match="no such argument"):
        asyncio.run(batch.advance(Policy(), 4, timeout_s=120))
