"""The router on two replicas of two processes each, with the hf engine: each process computes everything.

The second process of a replica is slower, and nothing but `EnginePeers` keeps it at the step of the first one.
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
from hybridrl.serving.replicas import GroupReplicas
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.routing_table import ReplicaState
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.workers.process_setup import init_worker_process
from hybridrl.workers.replica import ReplicaWorker
from hybridrl.workers.rollout import (
    EnginePeers,
    RolloutSetup,
    SamplingParams,
    batched_request_engine,
    make_rollout,
)
from hybridrl.workers.rollout.base import load_special_tokens
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import sequence_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 60
SAMPLING = SamplingParams(LENGTH, ignore_eos=True)
REQUESTS = [Request(f"r{i}", tuple(range(40 + 3 * i, 52 + 5 * i)), SAMPLING, seed=i + 1) for i in range(8)]


class PairedReplica(ReplicaWorker):
    """One of the two processes of a replica."""

    @classmethod
    def num_peers(cls, setup: RolloutSetup, *, num_threads: int | None = None) -> int:
        return 2

    def init_model(self) -> None:
        batched_request_engine.CHUNK_TOKENS = 4
        device = init_worker_process(device="cpu", num_threads=1)
        self.rollout = make_rollout("hf", replace(self.setup, device=device))
        engine = self._engine = self.rollout.request_engine()
        engine.peers, pause_s = EnginePeers(range(2)), 0.1 * (1 + self.rank % 2)
        step = engine.step

        def slow_step() -> list[TokenOutput]:
            time.sleep(pause_s)
            return step()

        engine.step = slow_step


@pytest.fixture(scope="module")
def setup(tiny_qwen2) -> RolloutSetup:
    tokens = load_special_tokens(str(tiny_qwen2))
    return RolloutSetup(
        str(tiny_qwen2), RolloutConfig(name="hf", dtype="float32"), tokens.eos_ids, tokens.pad_id, 60, LENGTH
    )


@pytest.fixture(scope="module")
def undisturbed(setup) -> dict[str, list[int]]:
    """The tokens of one batched call of one rollout."""
    keys = sequence_keys(torch.tensor([r.seed for r in REQUESTS]), 1)
    made = make_rollout("hf", setup).generate_tokens([list(r.prompt_ids) for r in REQUESTS], keys, SAMPLING)
    return {r.request_id: row.tolist() for r, row in zip(REQUESTS, made.tokens, strict=True)}


@pytest.fixture(scope="module")
def group(ray_cluster, setup) -> Iterator[RayWorkerGroup]:
    recipe = RayClassWithInitArgs(PairedReplica, setup, num_threads=1)
    with RayResourcePool([4], use_gpu=False) as pool, RayWorkerGroup(pool, recipe, role="rollout") as group:
        group.init_model()
        yield group


@pytest.mark.parametrize("victim", [None, 3], ids=["undisturbed", "rank 3 killed"])
def test_two_processes_are_one_replica_and_a_lost_one_costs_no_request_and_not_the_other_replica(
    group, undisturbed, victim
):
    before, pushed = list(group.process_ids), []

    def resync(ranks: Sequence[int]) -> None:
        pushed.append(list(ranks))

    async def run() -> tuple[ReplicaRouter, list[TokenOutput]]:
        replicas = GroupReplicas(group, version=0, progress_timeout_s=60, resync=resync, num_peers=2)
        async with ReplicaRouter(replicas) as router:
            tasks = [asyncio.create_task(router.generate(request)) for request in REQUESTS]
            while not router.table.load(1):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            if victim is not None:
                os.kill(before[victim], signal.SIGKILL)
            return router, await asyncio.gather(*tasks)

    router, outputs = asyncio.run(run())
    assert {output.request_id: output.token_ids for output in outputs} == undisturbed
    assert router.table.states == [ReplicaState.IDLE] * 2 and group.process_ids[:2] == before[:2]
    if victim is None:
        assert router.outages == [] and group.process_ids == before
        return
    [outage] = router.outages
    assert outage.replica == 1 and "rollout-3" in outage.cause and outage.num_retried > 0
    assert pushed == [[2, 3]] and not set(group.process_ids[2:]) & set(before)
