"""What the driver computes with up to 1024 ranks and 4096 replicas: `python benchmarks/scale.py [PART ...]`.

    calls    CPU milliseconds of the driver per call of a worker group. The calls are Ray's; two processes answer for
             all ranks.
    step     CPU milliseconds per step of GRPO on stand-ins for the workers: the driver's own (dispatch, merging,
             formulas, metrics, ledger), and those of the stand-ins, which a cluster's workers spend. Without Ray's
             part, which `calls` has.
    router   CPU microseconds per request of a router whose replicas sleep, and its memory.
    ledger   CPU milliseconds and bytes per step of the step ledger.

CPU time is that of the measuring process, with all threads of Ray in it. Medians; the spread is the smallest and the
largest value. The master with many workers: `benchmarks/heartbeats.py --workers 4096`.
"""

import argparse
import asyncio
import gc
import logging
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle
import ray
import torch

from hybridrl.protocol import DataProto
from hybridrl.serving.router import ReplicaRouter
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.processes.worker_host import WorkerHost
from hybridrl.single_controller.processes.worker_processes import WorkerProcesses
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup
from hybridrl.single_controller.worker import RankInfo, Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.trainer.checkpoint.step_ledger import StepLedger
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.simulation import DEVICES, MODELS, Costs, Simulation, simulate

os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, a busy machine starves the processes
RANKS = (1, 8, 64, 512, 1024)
PER_NODE, PROCESSES = 8, 2
ROWS, TOKENS, STEPS = 4096, 64, 6
METRICS = {f"actor/metric_{i}": [0.5] * 4 for i in range(20)}


class Rank(Worker):
    """Answers at once."""

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def metrics(self) -> dict[str, list[float]]:
        return METRICS

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"scores": data.batch["advantages"] * 2})


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU milliseconds of this process while it does the work, threads included."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def start_processes() -> list[Any]:
    """Return processes that answer for ranks."""
    host_cls = ray.remote(num_cpus=0)(WorkerHost)
    hosts = [host_cls.remote() for _ in range(PROCESSES)]
    recipes = cloudpickle.dumps({"rank": ClassWithInitArgs(Rank)})
    ray.get([host.setup.remote(recipes, RankInfo(0, 1, 0, 1, "127.0.0.1", 0), {}) for host in hosts])
    return hosts


def group_of(ranks: int, hosts: list[Any]) -> RayWorkerGroup:
    """Return a group of this many ranks in a few processes."""
    own = [hosts[rank // PER_NODE % PROCESSES] for rank in range(ranks)]
    processes = WorkerProcesses("rank", own, [f"rank-{rank}" for rank in range(ranks)], {"rank": Rank})
    return RayWorkerGroup.from_processes(processes, Rank, role="rank")


def calls(repeats: int, all_ranks: Sequence[int]) -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**9)
    hosts = start_processes()
    columns = {"advantages": torch.randn(ROWS, TOKENS), "input_ids": torch.randint(0, 50_000, (ROWS, 2 * TOKENS))}
    batch = DataProto.from_dict(tensors=columns)
    print(f"driver's CPU, ms per call: median (least to most) of {repeats}")
    print(f"{'ranks':>6}  {'call':<10}{'CPU':>28}")
    for ranks in all_ranks:
        group = group_of(ranks, hosts)
        work = {"nothing": group.nothing, "metrics": group.metrics, "batch": lambda g=group: g.score(batch)}
        for name, call in work.items():
            times = [cpu_ms(call) for _ in range(repeats + 1)][1:]
            print(f"{ranks:>6}  {name:<10}{spread(times):>28}", flush=True)
    ray.shutdown()


def step(repeats: int, all_ranks: Sequence[int]) -> None:
    costs = Costs(DEVICES["h100"], MODELS["qwen2.5-7b"])
    settings = {"actor_rollout_ref.actor.use_kl_loss": False}
    print(f"CPU per step of GRPO, ms, {ROWS} responses, 4 optimizer steps: median (least to most) of {repeats}")
    print(f"{'ranks':>6}{'driver':>30}{'stand-ins':>30}")
    runs = {
        ranks: Simulation(costs, ranks, prompts=ROWS // 8, n=8, mini_batch=ROWS // 32, warmup=0, settings=settings)
        for ranks in all_ranks
    }
    spent: dict[int, list[tuple[float, float]]] = {ranks: [] for ranks in all_ranks}
    for _ in range(repeats):
        for ranks, run in runs.items():
            few, many = (step_cpu_ms(replace(run, steps=n)) for n in (1, 1 + STEPS))
            spent[ranks].append(((many[0] - few[0]) / STEPS, (many[1] - few[1]) / STEPS))
    for ranks, pairs in spent.items():
        driver, workers = zip(*pairs, strict=True)
        print(f"{ranks:>6}{spread(driver):>30}{spread(workers):>30}", flush=True)


def step_cpu_ms(run: Simulation) -> tuple[float, float]:
    """Return the CPU milliseconds of the driver and of the stand-ins in a whole run."""
    gc.collect()
    start = time.thread_time()
    workers_ms = simulate(run).workers_cpu_s * 1e3
    return (time.thread_time() - start) * 1e3 - workers_ms, workers_ms


class Sleepers:
    """Replicas that answer each request after a time of its own."""

    can_respawn = False

    def __init__(self, num_replicas: int, seconds: dict[str, float]):
        self.num_replicas, self._seconds = num_replicas, seconds
        self._ends: list[dict[str, float]] = [{} for _ in range(num_replicas)]

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        """Sleep until a request has ended, or for a second."""
        now, ends = time.monotonic(), self._ends[replica]
        ends |= {request.request_id: now + self._seconds[request.request_id] for request in requests}
        time.sleep(max(0.0, min([1.0, *(end - now for end in ends.values())])))
        done = [name for name, end in ends.items() if end <= time.monotonic()]
        for name in done:
            del ends[name]
        return [TokenOutput(name, [1], [0.0], "stop", 0) for name in done]

    def respawn(self, replica: int) -> None:
        raise AssertionError(f"replica {replica} cannot be lost")


def router(repeats: int) -> None:
    print("router: replicas that sleep, 4 requests each; seconds of a request log-normal, median 1, the longest 28")
    for replicas in (64, 1024, 4096):
        draws = random.Random(0)
        seconds = {f"r{i}": min(28.0, draws.lognormvariate(0, 0.9)) for i in range(4 * replicas)}
        before = resident_mib()
        spent = cpu_ms(lambda replicas=replicas, seconds=seconds: asyncio.run(_serve(replicas, seconds)))
        print(
            f"{replicas:>6} replicas {len(seconds):>6} requests {spent / len(seconds) * 1e3:>8.0f} us per request, "
            f"{resident_mib() - before:.0f} MiB more at its peak",
            flush=True,
        )


async def _serve(replicas: int, seconds: dict[str, float]) -> None:
    sampling = SamplingParams(n=1, max_new_tokens=8)
    async with ReplicaRouter(Sleepers(replicas, seconds)) as router:
        requests = [Request(name, tuple(range(i, i + 64)), sampling, i) for i, name in enumerate(seconds)]
        await asyncio.gather(*(router.generate(request) for request in requests))


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ledger(repeats: int) -> None:
    print("step ledger")
    for prompts in (512, 4096, 16_384):
        with tempfile.TemporaryDirectory() as directory:
            book = StepLedger(directory, rows=10**6)
            book.start()
            spent = [
                cpu_ms(lambda n=n, p=prompts, b=book: b.end_step(n, epoch=0, prompts=range(n * p, (n + 1) * p)))
                for n in range(1, repeats + 2)
            ]
            size = os.path.getsize(book.path) / (repeats + 1)
            print(f"{prompts:>6} prompts per step: {spread(spent[1:])} ms, {size:.0f} bytes", flush=True)


PARTS: dict[str, Callable[..., None]] = {"ledger": ledger, "step": step, "router": router, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="of the parts calls and step")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    for part in arguments.parts or PARTS:
        if part in ("calls", "step"):
            PARTS[part](arguments.repeats, arguments.ranks)
        else:
            PARTS[part](arguments.repeats)


if __name__ == "__main__":
    main()
