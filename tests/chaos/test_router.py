"""Replicas killed or frozen while they serve: no request is lost, no answer is wrong, and they are rebuilt.

    ROUTER_REPETITIONS=20 pytest -m chaos -s tests/chaos/test_router.py    20 seeds, a line for each, and a table

Real processes, SIGKILL and SIGSTOP. Four replicas of the tiny model on the hf engine; the expected answers come from
one batched call in this process. A rebuilt replica serves in the next repetition, and may be its victim.
"""

import asyncio
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, replace

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.serving.replicas import GroupReplicas, ReplicaOutage
from hybridrl.serving.router import ReplicaRouter
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.workers.replica import ReplicaWorker
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.base import VERSION_ON_DISK, Rollout, load_special_tokens
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import sequence_keys
from tests.support.processes import is_alive

REPETITIONS = int(os.environ.get("ROUTER_REPETITIONS", "1"))
# A replica without an answer for this long counts as frozen. Four processes on two cores answer within a second; on a
# busy machine a higher value avoids false alarms, which are no errors but take time.
SILENT_S = float(os.environ.get("ROUTER_SILENCE_S", "5"))
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 240 * REPETITIONS)]

REPLICAS, REQUESTS, AT_ONCE, NEW_TOKENS = 4, 80, 16, 40


@dataclass
class Outcome:
    """outputs: request -> tokens. victim: replica that received the signal, at `sent_at`. outages: from the router."""

    outputs: dict[str, list[int]]
    victim: int
    sent_at: float
    outages: list[ReplicaOutage]


@dataclass
class Line:
    """Cost of one signal. out_s: until the router avoids the victim. back_s: until it uses the victim again."""

    lost: int
    wrong: int
    retried: int
    false_alarms: int
    out_s: float
    back_s: float


def requests_for(seed: int) -> list[Request]:
    rng = random.Random(seed)
    sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)
    prompts = [tuple(rng.randrange(40, 300) for _ in range(rng.randint(4, 24))) for _ in range(REQUESTS)]
    return [Request(f"r{i}", prompt, sampling, i * 31 + seed) for i, prompt in enumerate(prompts)]


def expected(rollout: Rollout, requests: list[Request]) -> dict[str, list[int]]:
    """Return the answers of one batched call of one rollout."""
    keys = sequence_keys(torch.tensor([r.seed for r in requests]), 1)
    made = rollout.generate_tokens([list(r.prompt_ids) for r in requests], keys, requests[0].sampling)
    return {r.request_id: row.tolist() for r, row in zip(requests, made.tokens, strict=True)}


async def serve(group: RayWorkerGroup, requests: list[Request], number: int, seed: int) -> Outcome:
    """Serve all requests, signal a random replica after a random number of answers, then serve some again."""
    rng = random.Random(f"{seed} {number}")
    replicas = GroupReplicas(group, version=VERSION_ON_DISK, progress_timeout_s=SILENT_S, resync=lambda ranks: None)
    victim, moment = rng.randrange(REPLICAS), rng.randint(1, REQUESTS // 2)
    outputs: dict[str, list[int]] = {}
    sent_at = 0.0
    limit = asyncio.Semaphore(AT_ONCE)
    async with ReplicaRouter(replicas) as router:

        async def one(request: Request) -> None:
            nonlocal sent_at
            async with limit:
                outputs[request.request_id] = (await router.generate(request)).token_ids
            if len(outputs) == moment:
                while any(
                    outage.restored_at is None for outage in router.outages
                ):  # let false alarms end before the signal is sent
                    await asyncio.sleep(0.02)
                sent_at = time.monotonic()
                os.kill(group.process_ids[victim], number)

        await asyncio.gather(*(one(request) for request in requests))
        while not _outages_of(router.outages, victim, sent_at) or any(
            outage.restored_at is None for outage in router.outages
        ):
            await asyncio.sleep(0.02)
        again = await asyncio.gather(
            *(router.generate(replace(r, request_id=f"again {r.request_id}")) for r in requests[:16])
        )
    outputs |= {out.request_id: out.token_ids for out in again}
    return Outcome(outputs, victim, sent_at, router.outages)


def _outages_of(outages: list[ReplicaOutage], victim: int, sent_at: float) -> list[ReplicaOutage]:
    return [outage for outage in outages if outage.replica == victim and outage.lost_at >= sent_at]


def line_of(outcome: Outcome, wanted: dict[str, list[int]]) -> Line:
    [outage, *_] = _outages_of(outcome.outages, outcome.victim, outcome.sent_at)
    return Line(
        lost=len(wanted.keys() - outcome.outputs.keys()),
        wrong=sum(outcome.outputs[name] != wanted[name] for name in outcome.outputs),
        retried=outage.num_retried,
        false_alarms=len(outcome.outages) - 1,
        out_s=outage.lost_at - outcome.sent_at,
        back_s=outage.restored_at - outcome.sent_at,
    )


def table(lines: dict[str, list[Line]]) -> str:
    """Return one row per signal: sums, and median and maximum of the seconds."""
    head = "signal   times  requests  lost  wrong  asked again  false alarms  routed around after (s)  back after (s)"
    rows = [head]
    for name, of in lines.items():
        out, back = ([getattr(line, which) for line in of] for which in ("out_s", "back_s"))
        rows.append(
            f"{name:<9}{len(of):>5}{len(of) * (REQUESTS + 16):>10}{sum(x.lost for x in of):>6}"
            f"{sum(x.wrong for x in of):>7}"
            f"{sum(x.retried for x in of):>13}{sum(x.false_alarms for x in of):>14}"
            f"{statistics.median(out):>17.2f} ({max(out):.2f}){statistics.median(back):>11.2f} ({max(back):.2f})"
        )
    return "\n".join([*rows, "seconds: median (largest)"])


def test_a_killed_and_then_a_frozen_replica_cost_no_request_and_no_answer(ray_cluster, tiny_qwen2):
    tokens = load_special_tokens(str(tiny_qwen2))
    setup = RolloutSetup(
        str(tiny_qwen2), RolloutConfig(name="hf", dtype="float32"), tokens.eos_ids, tokens.pad_id, 32, NEW_TOKENS
    )
    reference = make_rollout("hf", setup)
    lines: dict[str, list[Line]] = {"SIGKILL": [], "SIGSTOP": []}
    recipe = RayClassWithInitArgs(ReplicaWorker, setup, num_threads=1)
    with RayResourcePool([REPLICAS], use_gpu=False) as pool, RayWorkerGroup(pool, recipe, role="rollout") as group:
        group.init_model()
        for seed in range(REPETITIONS):
            requests = requests_for(seed)
            wanted = expected(reference, requests)
            wanted |= {f"again {r.request_id}": wanted[r.request_id] for r in requests[:16]}
            for name, of in lines.items():
                hurt = list(group.process_ids)
                outcome = asyncio.run(serve(group, requests, getattr(signal, name), seed))
                of.append(line_of(outcome, wanted))
                print(f"seed {seed} {name}: {of[-1]}", flush=True)
                assert of[-1].lost == of[-1].wrong == 0
                assert of[-1].out_s < SILENT_S + 2
                assert group.process_ids[outcome.victim] != hurt[outcome.victim]
                assert not is_alive(hurt[outcome.victim])
    print(table(lines))
