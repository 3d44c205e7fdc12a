"""Stages of a training step on a model of your own, beside bare loops of the same work: seconds, ratios, peak memory.

    python benchmarks/real_model.py MODEL [--prompts 8] [--n 8] [--tokens 48] [--rounds 3] [--dtypes float32 bfloat16]
    python benchmarks/real_model.py MODEL --trl ENV      also whole steps of GRPO, ours and TRL's
    python benchmarks/real_model.py MODEL --ways         also whole steps with `hf` and `vllm`, in process and on Ray

MODEL is a Hugging Face directory, or a GGUF file. The contenders run in turn, each in a process of its own, on the same
random prompts, and compute the same number of tokens:

    stage      ours                                        bare
    gen        the `hf` rollout                            transformers' generate
    prefill    the `hf` rollout, a token of long prompts   transformers' generate
    update     the FSDP engine, shared prefixes            padded rows, whole logits, autocast, AdamW
    push       engine to rollout, both ends verified       a copy and one fingerprint
    snapshot   what Ray stores of the engine, and a copy   a copy
    step       a whole step, with `--trl`                  TRL's, in an environment that has it or gets it

Seconds of the CPU hold on a busy machine, seconds of the wall say what a user waits on an idle one. The last column is
our model FLOPs per second of the wall, as a share of what this machine reaches in large products of the dtype.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybridrl  # noqa: F401 - before torch: how its idle threads wait, for both

import torch  # isort: skip

import pyarrow as pa
import pyarrow.parquet as pq
from versus_trl import SKIPPED_STEPS, trl_python
from versus_trl import run as run_steps

from hybridrl.config import model_folder
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.workers import FSDPConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import EngineSetup, MicroBatching
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
from hybridrl.workers.engine.snapshot import take_engine_state
from hybridrl.workers.engine.utilization.matmul_peak import matmul_peak
from hybridrl.workers.engine.utilization.model_flops import FORWARD, UPDATE, ModelFlops
from hybridrl.workers.process_setup import keep_freed_memory
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.sampling.sampler import default_seeds, sequence_keys
from hybridrl.workers.weight_transfer.fingerprint import fingerprint

STAGES = ("gen", "prefill", "update", "push", "snapshot")
CONTENDERS = ("ours", "bare")
PROMPT_TOKENS = 48
LONG_PROMPT_TOKENS = 512  # or as many as the model has positions for
PAD = 0
QUESTION = "Tom has {} apples and buys {} more. How many apples has he now? Think in one short sentence, then answer."
ADAM = {"lr": 1e-6, "betas": (0.9, 0.999), "weight_decay": 0.01}


def make_prompts(model: str, num: int, tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    """Return random prompts (num, tokens) int64 of the model's vocabulary."""
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    return torch.randint(1, size, (num, tokens), generator=torch.Generator().manual_seed(1))


def long_prompt_tokens(job: dict[str, Any]) -> int:
    from transformers import AutoConfig

    return min(LONG_PROMPT_TOKENS, AutoConfig.from_pretrained(job["model"]).max_position_embeddings - job["tokens"])


def make_rows(job: dict[str, Any], prompts: torch.Tensor) -> torch.Tensor:
    """Return rows (prompts * n, prompt and response) of random responses of full length."""
    drawn = torch.randint(
        1, int(prompts.max()), (len(prompts) * job["n"], job["tokens"]), generator=torch.Generator().manual_seed(2)
    )
    return torch.cat([prompts.repeat_interleave(job["n"], dim=0), drawn], dim=1)


def our_stages(job: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return stage -> its work. Those of which the FLOPs are known return them."""
    from transformers import AutoConfig

    keep_freed_memory()
    prompts = make_prompts(job["model"], job["prompts"])
    long_prompts = make_prompts(job["model"], job["prompts"], long_prompt_tokens(job))
    flops = ModelFlops.of(AutoConfig.from_pretrained(job["model"]))
    rows = make_rows(job, prompts)
    mask = torch.ones_like(rows)
    batch = DataProto.from_dict(
        tensors={
            "input_ids": rows,
            "attention_mask": mask,
            "position_ids": mask.cumsum(-1) - 1,
            "responses": rows[:, PROMPT_TOKENS:],
            "response_mask": mask[:, PROMPT_TOKENS:],
        }
    )
    engine = FSDPEngine(
        EngineSetup(
            kind="causal_lm",
            path=job["model"],
            settings=FSDPConfig(dtype=job["dtype"]),
            share_prefixes=True,
            optim=OptimConfig(lr=ADAM["lr"]),
            total_steps=100,
        )
    )
    engine.setup()
    config = RolloutConfig(dtype=job["dtype"])
    rollout = make_rollout("hf", RolloutSetup(job["model"], config, (), PAD, long_prompts.size(1), job["tokens"]))
    keys = sequence_keys(default_seeds(1, len(prompts)), job["n"])

    def loss(outputs: dict[str, torch.Tensor], _: DataProto) -> tuple[torch.Tensor, dict]:
        return -outputs["log_probs"].mean(), {}

    def prefill() -> float | None:
        rollout.generate_tokens(long_prompts.tolist(), keys[:: job["n"]], SamplingParams(1))
        return flops and flops.of_rows(
            torch.full((len(long_prompts),), long_prompts.size(1)), len(long_prompts), FORWARD
        )

    def update() -> float | None:
        engine.forward_backward(batch, MicroBatching(max_tokens=16384), loss, outputs=("log_probs",))
        engine.optimizer_step()
        return flops and flops.of_tokens(*engine.take_computed().values(), job["tokens"] * len(rows), UPDATE)

    def snapshot() -> list[Any]:
        return [array.copy() for array in take_engine_state(engine, is_copy=False)["tensors"]]

    return {
        "gen": lambda: rollout.generate_tokens(prompts.tolist(), keys, SamplingParams(job["tokens"], n=job["n"])),
        "prefill": prefill,
        "update": update,
        "push": lambda: rollout.load_weights(1, engine.weights()),
        "snapshot": snapshot,
    }


def bare_stages(job: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, job["dtype"])
    prompts = make_prompts(job["model"], job["prompts"])
    rows = make_rows(job, prompts)
    generator = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval().requires_grad_(False)
    trained = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True, **ADAM)
    repeated = prompts.repeat_interleave(job["n"], dim=0)
    long_prompts = make_prompts(job["model"], job["prompts"], long_prompt_tokens(job))

    @torch.inference_mode()
    def generate(rows: torch.Tensor, tokens: int) -> None:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        generator.generate(rows, attention_mask=torch.ones_like(rows), do_sample=True, pad_token_id=PAD, **length)

    def update() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = trained(input_ids=rows).logits[:, PROMPT_TOKENS - 1 : -1]
        log_probs = logits.float().log_softmax(-1).gather(-1, rows[:, PROMPT_TOKENS:, None])
        (-log_probs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def push() -> int:
        sources, targets = trained.state_dict(), dict(generator.named_parameters())
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(sources[name])
        return fingerprint(targets.items(), dtype)

    def snapshot() -> list[torch.Tensor]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*trained.parameters(), *trained.buffers(), *moments)]

    return {
        "gen": lambda: generate(repeated, job["tokens"]),
        "prefill": lambda: generate(long_prompts, 1),
        "update": update,
        "push": push,
        "snapshot": snapshot,
    }


def run_contender(who: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return medians of the seconds of each stage, and peak memory in GB.

    Seconds are of the CPU and of the wall. Of ours, also "share": stage -> FLOPs per second as a share of what this
    machine reaches in large products.
    """
    torch.set_num_threads(job["threads"])
    stages = {"ours": our_stages, "bare": bare_stages}[who](job)
    clocks: dict[str, Any] = {stage: [] for stage in STAGES}
    flops: dict[str, float] = {}
    for _ in range(job["rounds"] + 1):  # the first round allocates
        for stage in STAGES:
            start = time.process_time(), time.perf_counter()
            result = stages[stage]()
            clocks[stage].append((time.process_time() - start[0], time.perf_counter() - start[1]))
            if who == "ours" and isinstance(result, float):
                flops[stage] = result
    medians = {
        stage: [statistics.median(column) for column in zip(*found[1:], strict=True)] for stage, found in clocks.items()
    }
    peak = matmul_peak("cpu", getattr(torch, job["dtype"]))
    share = {stage: done / (medians[stage][1] * peak) for stage, done in flops.items()}
    return {**medians, "share": share, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def measure(who: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a contender in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"])}
    command = [sys.executable, Path(__file__), job["model"], "--contender", who, "--job", json.dumps(job)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{who} failed with {job}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(job: dict[str, Any]) -> None:
    """Print a row for each stage, and one of peak memory."""
    found = {who: measure(who, job) for who in CONTENDERS}
    head = f"{job['dtype']:>9} {job['threads']:7d}"
    for stage in STAGES:
        (cpu, wall), (bare_cpu, bare_wall) = (found[who][stage] for who in CONTENDERS)
        ratios = f"{cpu / bare_cpu:6.2f} {wall:8.3f} {bare_wall:8.3f} {wall / bare_wall:6.2f}"
        share = found["ours"]["share"].get(stage)
        of_peak = "" if share is None else f"{share:8.0%}"
        print(f"{head} {stage:>9} {cpu:8.3f} {bare_cpu:8.3f} {ratios} {of_peak}".rstrip(), flush=True)
    peaks = [found[who]["peak"] for who in CONTENDERS]
    print(f"{head} {'peak GB':>9} {peaks[0]:8.2f} {peaks[1]:8.2f} {peaks[0] / peaks[1]:6.2f}", flush=True)


def write_questions(path: Path, num: int) -> Path:
    """Write chat prompts with a ground truth, all of about the same length."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": QUESTION.format(10 + number % 7, 11 + number % 11)}],
            "reward_model": {"style": "rule", "ground_truth": str(21 + number % 7 + number % 11)},
            "extra_info": {"index": number},
        }
        for number in range(num)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def step_settings(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of whole steps, and write their prompts."""
    steps = job["rounds"] + SKIPPED_STEPS
    return {
        **{name: job[name] for name in ("model", "prompts", "n", "dtype", "threads")},
        "data": str(write_questions(folder / "prompts.parquet", job["prompts"] * steps)),
        "prompt_tokens": 2 * PROMPT_TOKENS,
        "response_tokens": job["tokens"],
        "steps": steps,
        "seed": 1,
        "lr": ADAM["lr"],
        "trl_micro_batch": job["prompts"] * job["n"],
    }


def median_step(python: Path, who: str, settings: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return the medians of CPU seconds, wall seconds and tokens over the measured steps."""
    steps = run_steps(python, who, settings, folder)[SKIPPED_STEPS:]
    return {name: statistics.median(step[name] for step in steps) for name in ("cpu_s", "wall_s", "tokens")}


def compare_steps(job: dict[str, Any], env: Path) -> None:
    """Print a row for whole steps of GRPO, ours and TRL's, and the tokens that they generated."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = step_settings(job, folder)
        ours = median_step(Path(sys.executable), "shared", settings, folder)
        theirs = median_step(trl_python(env), "trl", settings, folder)
    print(
        f"{job['dtype']:>9} {job['threads']:7d} {'step, TRL':>9} {ours['cpu_s']:8.3f} {theirs['cpu_s']:8.3f} "
        f"{ours['cpu_s'] / theirs['cpu_s']:6.2f} {ours['wall_s']:8.3f} {theirs['wall_s']:8.3f} "
        f"{ours['wall_s'] / theirs['wall_s']:6.2f}  tokens {ours['tokens']:.0f} and {theirs['tokens']:.0f}, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def compare_ways(job: dict[str, Any]) -> None:
    """Print a row for whole steps with each rollout and backend."""
    for rollout, backend in itertools.product(("hf", "vllm"), ("local", "ray")):
        with tempfile.TemporaryDirectory() as name:
            settings = step_settings(job, Path(name)) | {"rollout": rollout, "backend": backend}
            step = median_step(Path(sys.executable), "shared", settings, Path(name))
        what = f"step, {rollout}, {backend}"
        print(f"{job['dtype']:>9} {job['threads']:7d} {what:>18} {step['wall_s']:8.3f} s, {step['tokens']:.0f} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda path: model_folder(path, key="MODEL"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of each response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--trl", type=Path, metavar="ENV", help="virtual environment of TRL; made if it is missing")
    parser.add_argument("--ways", action="store_true", help="steps with each rollout and backend")
    parser.add_argument("--only-steps", action="store_true", help="no stages")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        print(json.dumps(run_contender(arguments.contender, arguments.job)))
        return
    sizes = {name: getattr(arguments, name) for name in ("model", "prompts", "n", "tokens", "rounds")}
    print(f"{sizes['prompts']} prompts x {sizes['n']} samples x {sizes['tokens']} tokens; medians of {sizes['rounds']}")
    clock = f"{'bare':>8} ratio"
    print(f"{'dtype':>9} {'threads':>7} {'stage':>9} {'CPU s':>8} {clock}  {'wall s':>8} {clock}  of peak")
    for dtype in arguments.dtypes:
        for threads in arguments.threads:
            job = {**sizes, "dtype": dtype, "threads": threads}
            if not arguments.only_steps:
                compare(job)
            if arguments.trl is not None:
                compare_steps(job, arguments.trl)
            if arguments.ways:
                compare_ways(job)


if __name__ == "__main__":
    main()
