"""Replicas that are killed or frozen while they serve: no request is lost, no answer is wrong, and they come back.

    ROUTER_REPETITIONS=20 pytest -m chaos -s tests/chaos/test_router.py      with 20 seeds; prints a line for each and a
    table

Real processes, SIGKILL and SIGSTOP. Four replicas of the tiny model on the hf engine; what they should say comes from
one batched call in this process. The replicas stay: one that came back serves in the next repetition, and may be the
next victim.
"""

import asyncio
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hybridrl.config.schema.workers import RolloutConfig
from hybridrl.serving.router import GroupReplicas, Outage, Router
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.workers.replica import ReplicaWorker
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.base import VERSION_ON_DISK, Rollout, load_special_tokens
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import sequence_keys

REPETITIONS = int(os.environ.get("ROUTER_REPETITIONS", "1"))
# Without an answer for so long a replica counts as frozen. Four processes on two cores answer within a second; where
# the machine has much else to do a higher number avoids false alarms, which are no mistakes but take time.
SILENT_S = float(os.environ.get("ROUTER_SILENCE_S", "5"))
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 240 * REPETITIONS)]

REPLICAS, REQUESTS, AT_ONCE, NEW_TOKENS = 4, 80, 16, 40


@dataclass
class Outcome:
    """outputs: request -> tokens. victim: replica that got the signal, at `sent_at`. outages: what the router saw."""

    outputs: dict[str, list[int]]
    victim: int
    sent_at: float
    outages: list[Outage]


@dataclass
class Line:
    """What one signal cost.

    out_s: until no request goes to the victim any more; back_s: until requests go to it again.
    """

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
    """What one batched call of one rollout says."""
    keys = sequence_keys(torch.tensor([r.seed for r in requests]), 1)
    made = rollout.generate_tokens([list(r.prompt_ids) for r in requests], keys, requests[0].sampling)
    return {r.request_id: row.tolist() for r, row in zip(requests, made.tokens, strict=True)}


async def serve(group: RayWorkerGroup, requests: list[Request], number: int, seed: int) -> Outcome:
    """Serve all requests, some at a time; after a random number of answers a random replica gets the signal.

    Then serve some again.
    """
    rng = random.Random(f"{seed} {number}")
    replicas = GroupReplicas(group, version=VERSION_ON_DISK, progress_timeout_s=SILENT_S, refill=lambda rank: None)
    victim, moment = rng.randrange(REPLICAS), rng.randint(1, REQUESTS // 2)
    outputs: dict[str, list[int]] = {}
    sent_at = 0.0
    places = asyncio.Semaphore(AT_ONCE)
    async with Router(replicas) as router:

        async def one(request: Request) -> None:
            nonlocal sent_at
            async with places:
                outputs[request.request_id] = (await router.generate(request)).token_ids
            if len(outputs) == moment:
                while any(
                    outage.back_at is None for outage in router.outages
                ):  # a false alarm is over before the signal is sent
                    await asyncio.sleep(0.02)
                sent_at = time.monotonic()
                os.kill(group.process_ids[victim], number)

        await asyncio.gather(*(one(request) for request in requests))
        while not _seen(router.outages, victim, sent_at) or any(outage.back_at is None for outage in router.outages):
            await asyncio.sleep(0.02)
        again = await asyncio.gather(
            *(router.generate(replace(r, request_id=f"again {r.request_id}")) for r in requests[:16])
        )
    outputs |= {out.request_id: out.token_ids for out in again}
    return Outcome(outputs, victim, sent_at, router.outages)


def _seen(outages: list[Outage], victim: int, sent_at: float) -> list[Outage]:
    return [outage for outage in outages if outage.replica == victim and outage.out_at >= sent_at]


def line_of(outcome: Outcome, wanted: dict[str, list[int]]) -> Line:
    [outage, *_] = _seen(outcome.outages, outcome.victim, outcome.sent_at)
    return Line(
        lost=len(wanted.keys() - outcome.outputs.keys()),
        wrong=sum(outcome.outputs[name] != wanted[name] for name in outcome.outputs),
        retried=outage.retried,
        false_alarms=len(outcome.outages) - 1,
        out_s=outage.out_at - outcome.sent_at,
        back_s=outage.back_at - outcome.sent_at,
    )


def table(lines: dict[str, list[Line]]) -> str:
    """One row for each signal: sums, and median and largest of the seconds."""
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
                assert not is_running(hurt[outcome.victim])
    print(table(lines))


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
