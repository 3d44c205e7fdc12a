"""A router whose last replica takes part only at times: requests move to it and back, and no token changes.

The replicas are `hf` rollouts in this process, and work in chunks of two tokens. So they are never lost;
`tests/end_to_end/test_hybrid_rollout.py` has processes.
"""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.serving.continuation import generate_in_chunks, join_chunks
from hybridrl.serving.router import ReplicaRouter
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, batched_request_engine, make_rollout
from hybridrl.workers.rollout.base import Rollout, load_special_tokens
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import sequence_keys
from tests.support.serving.local_replicas import LocalReplicas

LENGTH = 80
SAMPLING = SamplingParams(LENGTH, ignore_eos=True)
REQUESTS = [Request(f"r{i}", tuple(range(40 + 3 * i, 52 + 5 * i)), SAMPLING, seed=i + 1) for i in range(7)]


@pytest.fixture(scope="module")
def rollouts(tiny_qwen2) -> list[Rollout]:
    tokens = load_special_tokens(str(tiny_qwen2))
    config = RolloutConfig(name="hf", dtype="float32")
    setup = RolloutSetup(str(tiny_qwen2), config, tokens.eos_ids, tokens.pad_id, 40, LENGTH)
    return [make_rollout("hf", setup) for _ in range(2)]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(batched_request_engine, "CHUNK_TOKENS", 2)


async def collect(router: ReplicaRouter, request: Request) -> list[TokenOutput]:
    conversation = f"conversation {request.request_id}"
    return [chunk async for chunk in generate_in_chunks(router, request, conversation=conversation)]


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_responses_that_move_to_a_replica_and_back_have_the_tokens_of_undisturbed_ones(rollouts):
    replicas = LocalReplicas(rollouts)
    router = ReplicaRouter(replicas, hybrid=range(1, 2))

    async def run() -> list[list[TokenOutput]]:
        async with router:
            tasks = [asyncio.create_task(collect(router, request)) for request in REQUESTS]
            for visit in (1, 2):
                before, calls = router.num_tokens[1], list(replicas.served)
                await until(lambda calls=calls: replicas.served[0] > calls[0] + 1)
                router.add_hybrid()
                await until(lambda calls=calls: replicas.served[1] > calls[1] + 3)
                assert router.table.load(1) == 3 and router.table.load(0) == 4
                await router.remove_hybrid()
                assert router.table.load(1) == 0 and router.num_tokens[1] > before
                assert not any(task.done() for task in tasks), f"visit {visit} came too late"
            calls = replicas.served[1]
            chunks = await asyncio.gather(*tasks)
            assert replicas.served[1] == calls, "a replica that has left gets no calls, and is not probed"
            return chunks

    responses = [join_chunks("r", chunks) for chunks in asyncio.run(run())]
    keys = sequence_keys(torch.tensor([request.seed for request in REQUESTS]), 1)
    wanted = rollouts[0].generate_tokens([list(request.prompt_ids) for request in REQUESTS], keys, SAMPLING)
    assert [response.token_ids for response in responses] == wanted.tokens.tolist()
    found = torch.tensor([response.log_probs for response in responses])
    torch.testing.assert_close(found, wanted.log_probs, atol=1e-5, rtol=0)
    assert sum(router.num_tokens) == LENGTH * len(REQUESTS)


def test_a_replica_without_work_takes_over_requests_of_a_busy_one(rollouts):
    replicas = LocalReplicas(rollouts)
    router = ReplicaRouter(replicas, hybrid=range(1, 2))

    async def run() -> None:
        async with router:
            router.add_hybrid()
            first = asyncio.create_task(collect(router, REQUESTS[0]))  # goes to replica 0
            await until(lambda: router.table.load(0) == 1)
            router.balance()
            assert router.table.load(0) == 1, "a single request stays where it is"
            for request in REQUESTS[1:4]:
                router.table.move_conversation(f"conversation {request.request_id}", 0)
            others = [asyncio.create_task(collect(router, request)) for request in REQUESTS[1:4]]
            await until(lambda: router.table.load(0) == 4)
            router.balance()
            await until(lambda: router.table.load(1) == 2)
            await asyncio.gather(first, *others)
            await router.remove_hybrid()

    asyncio.run(run())


def test_closing_a_router_ends_the_requests_of_a_replica_that_has_joined(rollouts):
    router = ReplicaRouter(LocalReplicas(rollouts), hybrid=range(1, 2))

    async def run() -> None:
        await router.__aenter__()
        tasks = [asyncio.create_task(collect(router, request)) for request in REQUESTS]
        router.add_hybrid()
        await until(lambda: router.table.load(1) and router.table.load(0))
        await router.close(wait=True)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(run())
    assert [server.num_open() for server in router.replicas.servers] == [0, 0]
