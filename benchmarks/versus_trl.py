"""Seconds of a GRPO step and the learning curve, ours and TRL's, on the same model, prompts and reward.

    python benchmarks/versus_trl.py [--quickstart DIR] [--steps 10] [--rounds 3] [--jobs "quick;long prompts"]

`--quickstart` is the directory that `make train` wrote: both train its SFT model. TRL is installed into a virtual
environment of its own (`--env`), on top of this environment's packages. The contenders run in turn, each in a process
of its own; in every round their order changes. A job is 256 samples and one optimizer step per training step, without
Ray: n samples for each of 256 / n prompts. Seconds of the wall say what a user waits on an idle machine; seconds of the
CPU hold on a busy one. "shared" is ours with `actor.use_prefix_grouper=true`, which computes common first tokens once.
The figure has the reward of every step.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _quickstart import sft_model

HERE = Path(__file__).parent
TRL = "trl==1.16.0"
SAMPLES = 256  # of one step
SKIPPED_STEPS = 2  # the first steps include allocations and imports
CONTENDERS = ("ours", "shared", "trl")


@dataclass(frozen=True)
class Job:
    """One comparison.

    Attributes:
        n: Samples of each prompt.
        threads: Of torch.
        examples: Questions and answers before the question, which make the prompt longer.
    """

    n: int = 8
    threads: int = 1
    examples: int = 0

    def settings(self, quickstart: Path, folder: Path, *, steps: int, seed: int, trl_micro_batch: int) -> dict:
        """Return what `_versus_run.py` reads; writes the prompts to `folder`."""
        return {
            "model": str(sft_model(quickstart)),
            "data": str(write_prompts(quickstart / "data/train.parquet", folder, self.examples)),
            "prompts": SAMPLES // self.n,
            "prompt_tokens": 64 * (1 + self.examples),
            "response_tokens": 26,
            "steps": steps,
            "seed": seed,
            "trl_micro_batch": trl_micro_batch,
            **asdict(self),
        }


JOBS = {
    "quick": Job(),
    "quick, 2 threads": Job(threads=2),
    "long prompts": Job(examples=8),
    "n=16": Job(n=16),
    "n=16, long prompts": Job(n=16, examples=8),
}


def write_prompts(source: Path, folder: Path, examples: int) -> Path:
    """Return a file of the same questions, each with the same number of solved examples as earlier turns."""
    table = pq.read_table(source)
    rows = table.to_pylist()
    shots: list[dict[str, str]] = []
    for row in rows[:examples]:
        shots += [*row["prompt"], {"role": "assistant", "content": row["extra_info"]["answer"]}]
    path = folder / f"prompts_{examples}.parquet"
    prompts = [[*shots, *row["prompt"]] for row in rows]
    place = table.column_names.index("prompt")
    pq.write_table(table.set_column(place, "prompt", pa.array(prompts)), path)
    return path


def trl_python(env: Path) -> Path:
    """Return the interpreter of an environment with TRL, which is made if it is missing."""
    python = env / "bin/python"
    if not python.exists():
        venv.create(env, with_pip=True)
        # Packages of this environment (torch, transformers) are visible there; TRL is not visible here.
        [site] = env.glob("lib/python*/site-packages")
        (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", TRL], check=True)
    return python


def run(python: Path, who: str, settings: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Run one contender; return its steps."""
    job, out = folder / "job.json", folder / "steps.jsonl"
    job.write_text(json.dumps(settings))
    out.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(settings["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, HERE / "_versus_run.py", who, job, out], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in out.read_text().splitlines()]


def compare(job: Job, arguments: argparse.Namespace, folder: Path) -> dict[str, list[list[dict[str, float]]]]:
    """Run all contenders in every round; return contender -> its steps in each round."""
    found: dict[str, list[list[dict[str, float]]]] = {who: [] for who in CONTENDERS}
    for number in range(arguments.rounds):
        settings = job.settings(
            arguments.quickstart,
            folder,
            steps=arguments.steps + SKIPPED_STEPS,
            seed=number + 1,
            trl_micro_batch=arguments.trl_micro_batch,
        )
        for who in CONTENDERS if number % 2 else reversed(CONTENDERS):
            python = arguments.trl if who == "trl" else Path(sys.executable)
            found[who].append(run(python, who, settings, folder))
    return found


def medians(rounds: Sequence[Sequence[dict[str, float]]], name: str) -> list[float]:
    """Return the median over the steps of each round."""
    return [statistics.median(step[name] for step in steps[SKIPPED_STEPS:]) for steps in rounds]


def print_job(name: str, found: dict[str, list[list[dict[str, float]]]]) -> None:
    for clock, who in itertools.product(("cpu_s", "wall_s"), CONTENDERS[:-1]):
        ours, theirs = medians(found[who], clock), medians(found["trl"], clock)
        ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
        own, other = statistics.median(ours), statistics.median(theirs)
        print(
            f"{name:>20} {who:>7} {clock:>7} {own:8.3f} {other:8.3f} {SAMPLES / own:10.0f} {SAMPLES / other:10.0f} "
            f"{statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def draw(results: dict[str, dict[str, list[list[dict[str, float]]]]], path: Path) -> None:
    """Draw the reward of every step: a panel for each job, a line for each contender and round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.5 * len(results), 3.6), squeeze=False, sharey=True)
    for axis, (name, found) in zip(axes[0], results.items(), strict=True):
        for who, colour in zip(CONTENDERS, ("C0", "C2", "C1"), strict=True):
            for number, steps in enumerate(found[who]):
                rewards = [step["reward"] for step in steps]
                axis.plot(range(1, len(rewards) + 1), rewards, colour, label=who if number == 0 else None, alpha=0.8)
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean reward of 256 samples")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quickstart", type=Path, default=Path("outputs/quickstart"), help="output directory of `make train`"
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender and job, each with its own seed")
    parser.add_argument("--jobs", default=";".join(JOBS), help="names of jobs, separated by ;")
    parser.add_argument("--env", type=Path, default=HERE.parent / ".venv-trl", help="TRL's virtual environment")
    parser.add_argument("--figure", type=Path, default=Path("versus_trl.png"))
    parser.add_argument("--trl-micro-batch", type=int, default=64, help="TRL's rows of one forward and backward pass")
    arguments = parser.parse_args()
    names = arguments.jobs.split(";")
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"--jobs: {unknown[0]!r} is not one of {'; '.join(JOBS)}")
    arguments.trl = trl_python(arguments.env)
    arguments.quickstart = arguments.quickstart.resolve()
    print(f"{SAMPLES} samples per step; medians of {arguments.rounds} rounds of {arguments.steps} steps")
    print(
        f"{'job':>20} {'':>7} {'clock':>7} {'ours':>8} {'TRL':>8} {'ours/s':>10} {'TRL/s':>10}  "
        "ratio (lowest to highest)"
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            results[name] = compare(JOBS[name], arguments, Path(folder))
            print_job(name, results[name])
    draw(results, arguments.figure)
    print(f"rewards of every step: {arguments.figure}")


if __name__ == "__main__":
    main()
