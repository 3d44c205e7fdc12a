"""The router on real replicas: `pause`, `resume` and `abort` with open requests, and a weight push in between.

Two processes with the hf engine. Each slice of work is a few tokens, so that a pause falls into a response.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.serving.continuation import generate_in_chunks, join_chunks
from hybridrl.serving.replicas import GroupReplicas
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.routing_table import ReplicaState
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.workers.replica import ReplicaWorker
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, batched_request_engine, make_rollout
from hybridrl.workers.rollout.base import load_special_tokens
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import sequence_keys

LENGTH = 60
SAMPLING = SamplingParams(LENGTH, ignore_eos=True)
REQUESTS = [Request(f"r{i}", tuple(range(40 + 3 * i, 52 + 5 * i)), SAMPLING, seed=i + 1) for i in range(6)]


class SlowReplica(ReplicaWorker):
    """Works in slices of four tokens and sleeps after each, so that a response takes seconds on any machine."""

    def init_model(self) -> None:
        batched_request_engine.CHUNK_TOKENS = 4
        super().init_model()
        engine = self._engine
        step = engine.step

        def step_and_sleep() -> list[TokenOutput]:
            done = step()
            time.sleep(0.15)
            return done

        engine.step = step_and_sleep

    def add_noise(self, version: int) -> None:
        """Load other weights, the same in every process."""
        from transformers import AutoModelForCausalLM

        weights = AutoModelForCausalLM.from_pretrained(self.rollout.setup.model_path, dtype=torch.float32).state_dict()
        noise = torch.Generator().manual_seed(7)
        self.load_weights(
            version, [(name, w + 0.2 * torch.randn(w.shape, generator=noise)) for name, w in weights.items()]
        )


@pytest.fixture(scope="module")
def setup(tiny_qwen2) -> RolloutSetup:
    tokens = load_special_tokens(str(tiny_qwen2))
    return RolloutSetup(
        str(tiny_qwen2), RolloutConfig(name="hf", dtype="float32"), tokens.eos_ids, tokens.pad_id, 40, LENGTH
    )


@pytest.fixture(scope="module")
def undisturbed(setup) -> dict[str, list[int]]:
    """The tokens of one batched call of one rollout."""
    keys = sequence_keys(torch.tensor([r.seed for r in REQUESTS]), 1)
    made = make_rollout("hf", setup).generate_tokens([list(r.prompt_ids) for r in REQUESTS], keys, SAMPLING)
    return {r.request_id: row.tolist() for r, row in zip(REQUESTS, made.tokens, strict=True)}


@pytest.fixture(scope="module")
def group(ray_cluster, setup) -> Iterator[RayWorkerGroup]:
    recipe = RayClassWithInitArgs(SlowReplica, setup, num_threads=1)
    with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, recipe, role="rollout") as group:
        group.init_model()
        yield group


async def collect_chunks(router: ReplicaRouter, request: Request) -> list[TokenOutput]:
    return [chunk async for chunk in generate_in_chunks(router, request)]


async def until_some_are_open(router: ReplicaRouter, *tasks: asyncio.Task) -> None:
    """Wait until replicas have worked on some of these tasks for a moment."""
    while not any(router.table.load(replica) for replica in range(2)):
        assert not all(task.done() for task in tasks), "all responses have ended already"
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.15)


def test_a_paused_response_continues_with_the_tokens_of_an_undisturbed_one(group, undisturbed):
    async def run() -> list[list[TokenOutput]]:
        async with ReplicaRouter(GroupReplicas(group, version=0, progress_timeout_s=60)) as router:
            tasks = [asyncio.create_task(collect_chunks(router, request)) for request in REQUESTS]
            for _ in range(3):
                await until_some_are_open(router, *tasks)
                await router.pause()
                assert [router.table.load(replica) for replica in range(2)] == [0, 0]
                router.resume()
            return await asyncio.gather(*tasks)

    responses = {r.request_id: parts for r, parts in zip(REQUESTS, asyncio.run(run()), strict=True)}
    assert {name: join_chunks(name, parts).token_ids for name, parts in responses.items()} == undisturbed
    cut = [part for parts in responses.values() for part in parts if part.finish_reason == "pause"]
    assert any(0 < len(part.token_ids) < LENGTH for part in cut)
    assert all(
        parts[-1].finish_reason == "length" and join_chunks(n, parts).mixed == () for n, parts in responses.items()
    )


def test_after_a_push_during_a_pause_the_rest_of_a_response_has_the_new_version_per_token(group, setup, undisturbed):
    request = REQUESTS[0]

    async def run() -> tuple[TokenOutput, int]:
        replicas = GroupReplicas(group, version=0, progress_timeout_s=60)
        async with ReplicaRouter(replicas) as router:
            task = asyncio.create_task(collect_chunks(router, request))
            late = None
            await until_some_are_open(router, task)
            await router.pause()
            group.execute_all("add_noise", 1)
            replicas.version = 1
            late = asyncio.create_task(
                router.generate(replace(request, request_id="late"))
            )  # waits for the end of the pause
            await asyncio.sleep(0.2)
            assert not late.done() and not task.done()
            router.resume()
            return join_chunks("r0", await task), (await late).version

    try:
        whole, version_of_late = asyncio.run(run())
    finally:
        group.init_model()
    before = whole.token_versions.count(0)
    assert 0 < before < LENGTH and whole.token_versions == [0] * before + [1] * (LENGTH - before)
    assert whole.version == 0 and version_of_late == 1
    assert (
        whole.token_ids[:before] == undisturbed["r0"][:before]
        and whole.token_ids[before:] != undisturbed["r0"][before:]
    )
    # The rest are the tokens of the new weights after these tokens, on any process.
    rollout = make_rollout("hf", setup)
    SlowReplica.add_noise(_LocalWeights(rollout), 1)
    rest = rollout.generate_tokens(
        [[*request.prompt_ids, *whole.token_ids[:before]]], _key_at(request, before), SAMPLING
    )
    assert rest.tokens[0, : LENGTH - before].tolist() == whole.token_ids[before:]


class _LocalWeights(SlowReplica):
    """The same weights in this process."""

    def __init__(self, rollout):
        self.rollout = rollout


def _key_at(request: Request, num_done: int) -> torch.Tensor:
    return replace(request, prompt_ids=(*request.prompt_ids, *[0] * num_done), num_done=num_done).key


def test_an_aborted_request_returns_its_tokens_so_far_and_others_are_unaffected(group, undisturbed):
    async def run() -> list[TokenOutput]:
        async with ReplicaRouter(GroupReplicas(group, version=0, progress_timeout_s=60)) as router:
            tasks = [asyncio.create_task(router.generate(request)) for request in REQUESTS]
            await until_some_are_open(router, *tasks)
            router.abort("r1")
            router.abort("unknown")
            return await asyncio.gather(*tasks)

    outputs = {output.request_id: output for output in asyncio.run(run())}
    aborted = outputs.pop("r1")
    assert aborted.finish_reason == "abort" and 0 < len(aborted.token_ids) < LENGTH
    assert aborted.token_ids == undisturbed["r1"][: len(aborted.token_ids)]
    assert {name: output.token_ids for name, output in outputs.items()} == {
        n: t for n, t in undisturbed.items() if n != "r1"
    }


def test_a_pause_without_open_requests_returns_at_once_and_a_paused_router_can_close(group):
    async def run() -> None:
        router = ReplicaRouter(GroupReplicas(group, version=0, progress_timeout_s=60))
        async with router:
            await asyncio.wait_for(router.pause(), 5)
            waiting = asyncio.create_task(router.generate(REQUESTS[0]))
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(900)  # seven processes start, one after the other
def test_a_replica_that_dies_during_its_restart_is_restarted_again_within_its_limit(group, undisturbed):
    """The first loss and two during the restart are within the limit of three, a third one during it is not."""

    async def run(kills: int) -> tuple[ReplicaRouter, list[int]]:
        process_ids: list[int] = []

        def resync(ranks: Sequence[int]) -> None:
            process_ids.append(group.process_ids[ranks[0]])
            if len(process_ids) <= kills:
                os.kill(process_ids[-1], signal.SIGKILL)
                group.execute_ranks(ranks, "query_mesh_place", "any")  # finds the loss, as a push does

        replicas = GroupReplicas(group, version=0, progress_timeout_s=60, resync=resync)
        async with ReplicaRouter(replicas) as router:
            tasks = [asyncio.create_task(router.generate(request)) for request in REQUESTS]
            await until_some_are_open(router, *tasks)
            os.kill(group.process_ids[0], signal.SIGKILL)
            outputs = await asyncio.gather(*tasks)
        assert {output.request_id: output.token_ids for output in outputs} == undisturbed
        return router, process_ids

    before = group.process_ids[0]
    router, process_ids = asyncio.run(run(2))
    [outage] = router.outages
    assert outage.restored_at is not None and router.table.states == [ReplicaState.IDLE] * 2
    assert len({*process_ids, before}) == 4 and group.process_ids[0] == process_ids[-1]
    try:
        router, process_ids = asyncio.run(run(3))
    finally:
        group.respawn(0)
        group.execute_ranks([0], "init_model")
    [outage] = router.outages
    assert outage.restored_at is None and len(process_ids) == 3
    assert router.table.states == [ReplicaState.GIVEN_UP, ReplicaState.IDLE]
