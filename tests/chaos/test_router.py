"""Replicas that are killed or frozen while they serve: no request is lost, no answer is wrong, and they come back.

    ROUTER_REPETITIONS=20 pytest -m chaos -s tests/chaos/test_router.py      with 20 seeds; a line for each

Real processes, SIGKILL and SIGSTOP. Four replicas of the tiny model on the hf engine; what they should say comes from one batched call
in this process.
"""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hybridrl.config import PPOConfig, load_config
from hybridrl.config.workers import RolloutConfig
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.resource_pool import RayResourcePool
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.router import GroupReplicas, Outage, Router
from hybridrl.workers.rollout.sampler import sequence_keys
from hybridrl.workers.rollout.serving import Request
from hybridrl.workers.tokens import load_special_tokens

REPETITIONS = int(os.environ.get("ROUTER_REPETITIONS", "1"))
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(420 + 240 * REPETITIONS)]

REPLICAS, REQUESTS, AT_ONCE, NEW_TOKENS = 4, 120, 16, 40
SILENT_S = 10.0  # four processes on a machine that has other work may take seconds for their first tokens


class SelfFilledReplica(ActorRolloutRefWorker):
    """A rollout whose weights are those of the model's directory: there is no trainer here to push any."""

    def fill(self, version: int) -> None:
        from transformers import AutoModelForCausalLM

        path = self.config.actor_rollout_ref.model.path
        self.rollout.load_weights(version, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict().items())


@dataclass
class Outcome:
    """outputs: request -> tokens. victim: replica that got the signal, at `sent_at`. outages: what the router saw."""

    outputs: dict[str, list[int]]
    victim: int
    sent_at: float
    outages: list[Outage]


def requests_for(seed: int) -> list[Request]:
    rng = random.Random(seed)
    sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)
    prompts = [tuple(rng.randrange(40, 300) for _ in range(rng.randint(4, 24))) for _ in range(REQUESTS)]
    return [Request(f"r{i}", prompt, sampling, i * 31 + seed) for i, prompt in enumerate(prompts)]


def expected(model: Path, requests: list[Request]) -> dict[str, list[int]]:
    """What one batched call of one rollout says."""
    tokens = load_special_tokens(str(model), trust_remote_code=False)
    setup = RolloutSetup(str(model), RolloutConfig(name="hf", dtype="float32"), tokens.eos_ids, tokens.pad_id, 32, NEW_TOKENS)
    keys = sequence_keys(torch.tensor([r.seed for r in requests]), 1)
    made = make_rollout("hf", setup).generate_tokens([list(r.prompt_ids) for r in requests], keys, requests[0].sampling)
    return {r.request_id: row.tolist() for r, row in zip(requests, made.tokens, strict=True)}


async def serve(group: RayWorkerGroup, requests: list[Request], number: int, seed: int) -> Outcome:
    """Serve all requests, some at a time; after a random number of answers a random replica gets the signal. Then serve some again."""
    rng = random.Random(seed)
    replicas = GroupReplicas(group, version=1, progress_timeout_s=SILENT_S, refill=lambda rank: group.execute_rank(rank, "fill", 1))
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
                sent_at = time.monotonic()
                os.kill(group.process_ids[victim], number)

        await asyncio.gather(*(one(request) for request in requests))
        while not any(outage.replica == victim for outage in router.outages) or any(outage.back_at is None for outage in router.outages):
            await asyncio.sleep(0.02)
        again = await asyncio.gather(*(router.generate(replace(r, request_id=f"again {r.request_id}")) for r in requests[:16]))
    outputs |= {out.request_id: out.token_ids for out in again}
    return Outcome(outputs, victim, sent_at, router.outages)


def start_group(model: Path, pool: RayResourcePool) -> RayWorkerGroup:
    changes = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "hf",
        "data.train_files": "none.parquet",
        "data.max_prompt_length": 32,
        "data.max_response_length": NEW_TOKENS,
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
    }
    config = load_config(PPOConfig, [f"{key}={value}" for key, value in changes.items()], program="test", config_name="ppo_trainer")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(SelfFilledReplica, config, "rollout"), role="rollout")
    group.init_model()
    group.execute_all("fill", 1)
    return group


def test_a_killed_and_then_a_frozen_replica_cost_no_request_and_no_answer(ray_cluster, tiny_qwen2):
    with RayResourcePool([REPLICAS], use_gpu=False) as pool, start_group(tiny_qwen2, pool) as group:
        for seed in range(REPETITIONS):
            requests = requests_for(seed)
            wanted = expected(tiny_qwen2, requests)
            wanted |= {f"again {r.request_id}": wanted[r.request_id] for r in requests[:16]}
            for number in (signal.SIGKILL, signal.SIGSTOP):
                hurt = list(group.process_ids)
                outcome = asyncio.run(serve(group, requests, number, seed))
                [outage, *_] = [outage for outage in outcome.outages if outage.replica == outcome.victim]
                false_alarms = len(outcome.outages) - 1
                out_s, back_s = outage.out_at - outcome.sent_at, outage.back_at - outcome.sent_at
                lost, wrong = len(wanted.keys() - outcome.outputs.keys()), sum(outcome.outputs[r] != wanted[r] for r in outcome.outputs)
                print(
                    f"seed {seed} {number.name}: lost {lost}, wrong {wrong}, asked again {outage.retried}",
                    end=f", false alarms {false_alarms}, ",
                )
                print(f"routed around after {out_s:.2f} s, back after {back_s:.2f} s")
                assert lost == wrong == 0
                assert out_s < (2 if number == signal.SIGKILL else SILENT_S + 2)
                assert group.process_ids[outcome.victim] != hurt[outcome.victim]
                assert not is_running(hurt[outcome.victim])


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
