"""Measure all figures of one GPU within a time limit, and write docs/gpu.md.

They are tests, GRPO of a real model, engine, and kernel paths.

    python benchmarks/gpu.py MODEL [--limit_s 1620] [--out outputs/gpu] [--steps 20] [--device cuda]

MODEL is a Hugging Face directory, such as SmolLM2-135M-Instruct. Needs no package index and no network: everything runs
with trainer.backend=local in processes of its own. A command that would exceed the limit is ended, and the next one is
not started; after each one the page has what was measured so far, below the line `MARK`.

    tests        tests/gpu
    grpo         a GRPO run in bfloat16 with the tree attention (FlexAttention) and the head in chunks
    no tree      the same without shared prefixes: packed rows
    whole head   the same with whole logits
    engine       benchmarks/engine.py: the FSDP engine beside a bare loop, on a model of 0.4 G parameters
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
MARK = "<!-- below: python benchmarks/gpu.py -->"
LEAST_S = 20.0  # a command with less time left is not started
SHOWN = ("timing_s/gen", "timing_s/update_actor", "timing_s/step")
MFU = ("perf/mfu/rollout", "perf/mfu/actor")
TAIL_LINES = 18  # of a command's output on the page


@dataclass
class Result:
    """What a command has done."""

    name: str
    words: Sequence[str]
    outcome: str
    seconds: float
    output: str


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit_s", type=float, default=1620.0, help="27 minutes: the machine ends after 30")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, with 8 samples each")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a response")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip", nargs="*", default=[], help="commands to leave out")
    parser.add_argument("--page", type=Path, default=Path("docs/gpu.md"))
    return parser.parse_args()


def grpo(options: argparse.Namespace, name: str, *, steps: int, tree: bool = True, chunked: bool = True) -> list[str]:
    """Return the command of a GRPO run, which writes to `out/name`."""
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": options.out / "data/train.parquet",
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": 160,
        "data.max_response_length": options.tokens,
        f"{model}.path": options.model,
        f"{model}.use_remove_padding": True,
        f"{model}.use_fused_kernels": chunked,
        f"{actor}.optim.lr": 2e-5,
        f"{actor}.ppo_mini_batch_size": options.prompts,
        f"{actor}.use_prefix_grouper": tree,
        f"{actor}.fsdp_config.dtype": "bfloat16",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "bfloat16",
        "actor_rollout_ref.rollout.n": 8,
        "custom_reward_function.path": "examples/smollm/reward.py",
        "trainer.backend": "local",
        "trainer.device": options.device,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": 1000,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console,jsonl]",
        "trainer.default_local_dir": options.out / name.replace(" ", "_"),
    }
    return [sys.executable, "-m", "hybridrl.main_ppo", *(f"{key}={value}" for key, value in settings.items())]


def commands(options: argparse.Namespace) -> Iterator[tuple[str, list[str], float]]:
    """Yield name, command and the largest share of the limit that it may take."""
    few, python = max(2, options.steps // 4), sys.executable
    yield (
        "data",
        [python, "-m", "examples.smollm.make_data", "--local_dir", str(options.out / "data"), "--seed", "1"],
        0.1,
    )
    yield (
        "tests",
        [python, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "--durations=0", "-p", "no:cacheprovider"],
        0.4,
    )
    yield "grpo", grpo(options, "grpo", steps=options.steps), 0.4
    yield "no tree", grpo(options, "no tree", steps=few, tree=False), 0.15
    yield "whole head", grpo(options, "whole head", steps=few, chunked=False), 0.15
    engine = [python, "benchmarks/engine.py", "--device", options.device, "--dtype", "bfloat16", "--repeats", "5"]
    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
    size |= {"vocab_size": 32000, "rows": 64, "prompt": 128, "response": 128, "micro_rows": 16}
    small = {"repeats": 2, "rows": 32}
    chosen = size if options.device == "cuda" else small
    yield "engine", engine + [word for name, number in chosen.items() for word in (f"--{name}", str(number))], 0.3


def run(name: str, words: Sequence[str], *, limit_s: float, log: Path, device: str) -> Result:
    """Run a command until it ends or its time is over; its output goes to `log`, too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"GPU_TESTS_ON": device, "TOKENIZERS_PARALLELISM": "false"}
    start = time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                words, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=limit_s, cwd=ROOT
            )
            outcome = "done" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after its share of the time ({limit_s:.0f} s)"
    return Result(name, words, outcome, time.monotonic() - start, log.read_text(encoding="utf-8", errors="replace"))


def run_table(options: argparse.Namespace, results: Sequence[Result]) -> list[str]:
    """Return a table of the GRPO runs, with medians over their steps.

    The first step is left out: kernels are compiled in it.
    """
    lines = ["| run | steps | reward, first and last | " + " | ".join((*SHOWN, *MFU)) + " |"]
    lines.append("|---" * (3 + len(SHOWN) + len(MFU)) + "|")
    for result in results:
        path = options.out / result.name.replace(" ", "_") / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        if not rows:
            continue
        rewards = " and ".join(f"{row['critic/score/mean']:.3f}" for row in (rows[0], rows[-1]))
        later = rows[1:] or rows
        seconds = [f"{statistics.median(row.get(key, float('nan')) for row in later):.3f} s" for key in SHOWN]
        shares = [f"{statistics.median(row.get(key, float('nan')) for row in later):.2%}" for key in MFU]
        lines.append(f"| {result.name} | {len(rows)} | {rewards} | " + " | ".join((*seconds, *shares)) + " |")
    return lines


def page(options: argparse.Namespace, results: Sequence[Result], *, device: str) -> str:
    """Return what is written below the mark."""
    lines = [MARK, "", f"## Figures of {device}", "", f"torch {torch.__version__}, model {options.model.name}.", ""]
    lines += ["| command | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {result.name} | {result.outcome} | {result.seconds:.0f} |" for result in results]
    lines += ["", *run_table(options, results)]
    for result in (result for result in results if result.name in ("tests", "engine")):
        tail = result.output.rstrip().splitlines()[-TAIL_LINES:]
        lines += ["", f"### {result.name}", "", "```text", *tail, "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU (a rehearsal)"
    start, results = time.monotonic(), list[Result]()
    for name, words, share in commands(options):
        left_s = options.limit_s - (time.monotonic() - start)
        if name in options.skip:
            continue
        if left_s < LEAST_S:
            results.append(Result(name, words, "not started: the time is over", 0.0, ""))
        else:
            log, limit_s = options.out / f"{name.replace(' ', '_')}.txt", min(left_s, share * options.limit_s)
            results.append(run(name, words, limit_s=limit_s, log=log, device=options.device))
        sys.stdout.write(f"{name}: {results[-1].outcome}, {results[-1].seconds:.0f} s\n")
        sys.stdout.flush()
        before = options.page.read_text(encoding="utf-8").split(MARK)[0] if options.page.is_file() else ""
        options.page.write_text(before + page(options, results, device=device), encoding="utf-8")
    return int(any(result.outcome.startswith("exit") for result in results))


if __name__ == "__main__":
    sys.exit(main())
