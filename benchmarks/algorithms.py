"""Held-out accuracy by step of nine algorithms: `python benchmarks/algorithms.py`, 40 minutes on one core.

Trains the quick start's supervised model on its arithmetic task, once per algorithm and seed, in one process with one
thread. The settings of an algorithm are in `CASES`. All other settings are those of the quick start, but for `COMMON`:

- a smaller learning rate: at the quick start's, most algorithms reach 0.9 within three steps,
- two mini-batches in a step: in the second one the ratio of new and old probability is not 1.

`examples/quickstart/run.sh` makes the supervised model of a seed. Finished runs are kept in `--out`, so a benchmark
that was stopped goes on where it was. The table has, with mean and range over the seeds,

- the accuracy before training, and after fixed numbers of steps,
- the first validated step with an accuracy of 0.9; inf: none,
- the seconds of a step without its validation: the median of a run, the least of the seeds.

`--quick` takes one seed and nine steps, 8 minutes. `--figure` draws the curves.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _quickstart import run_grpo, sft_model

from hybridrl.trainer.run.report import merge_steps
from hybridrl.trainer.run.tracking import read_metrics

ROOT = Path(__file__).parents[1]
ACTOR = "actor_rollout_ref.actor"
GOAL = 0.9
VALIDATE_EVERY = 3
SKIPPED_STEPS = 3  # the first steps include allocations and imports
COMMON = {
    f"{ACTOR}.optim.lr": 5e-5,
    f"{ACTOR}.ppo_mini_batch_size": 16,
    f"{ACTOR}.clip_ratio_high": 0.2,
    "trainer.backend": "local",
    "trainer.test_freq": VALIDATE_EVERY,
    "trainer.val_before_train": True,
}
CASES = {
    "GRPO": {},
    "PPO": {
        "algorithm.adv_estimator": "gae",
        "critic.optim.lr": 1e-3,
        "trainer.critic_warmup": 5,
    },
    "Dr. GRPO": {
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "DAPO": {
        f"{ACTOR}.clip_ratio_high": 0.28,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "data.gen_batch_size": 64,
        "reward_model.reward_manager": "dapo",
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 4,
    },
    "GSPO": {
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.clip_ratio_low": 3e-4,
        f"{ACTOR}.clip_ratio_high": 4e-4,
    },
    "GSPO, wide clip": {
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.clip_ratio_low": 3e-2,
        f"{ACTOR}.clip_ratio_high": 4e-2,
    },
    "CISPO": {
        f"{ACTOR}.policy_loss.loss_mode": "cispo",
        f"{ACTOR}.clip_ratio_low": 1,
        f"{ACTOR}.clip_ratio_high": 4,
    },
    "RLOO": {"algorithm.adv_estimator": "rloo"},
    "ReMax": {"algorithm.adv_estimator": "remax"},
    "REINFORCE++": {"algorithm.adv_estimator": "reinforce_plus_plus"},
}


@dataclass(frozen=True)
class Curve:
    """One run. accuracy: by step, 0 is before training. step_s: seconds of a step without validation."""

    accuracy: dict[int, float]
    step_s: float

    def steps_to_goal(self) -> float:
        """Return the first validated step with an accuracy of `GOAL`, or infinity."""
        return min((step for step, value in self.accuracy.items() if value >= GOAL), default=float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/algorithms"), help="runs, finished and not")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="ALGORITHM")
    parser.add_argument("--figure", type=Path, help="picture to write, PNG or SVG")
    parser.add_argument("--quick", action="store_true", help="one seed, nine steps; overrides --seeds and --steps")
    parser.add_argument("--show", action="store_true", help="train nothing: the table of the runs that are finished")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = [1], 9
    if not options.show:
        train_all(options.out, options.only, options.seeds, steps=options.steps)
    curves = {name: finished_curves(options.out, name, options.seeds, options.steps) for name in options.only}
    print_table(curves, steps=options.steps)
    if options.figure:
        draw(curves, options.figure)


# -- runs


def train_all(out: Path, names: Sequence[str], seeds: Sequence[int], *, steps: int) -> None:
    """Train what is not finished, one seed after the other.

    So a part of the runs has every algorithm.
    """
    for seed in seeds:
        quickstart = out / f"seed_{seed}"
        if not sft_model(quickstart).is_dir():
            train_supervised(quickstart, seed)
        for name in names:
            folder = run_folder(out, name, seed, steps)
            if read_curve(folder, steps) is None:
                train(name, quickstart, folder, seed=seed, steps=steps)


def run_folder(out: Path, name: str, seed: int, steps: int) -> Path:
    """Return where a run writes: GSPO, wide clip -> seed_1/gspo_wide_clip_30_steps."""
    label = name.lower().replace(" ", "_").replace(".", "").replace(",", "")
    return out / f"seed_{seed}/{label}_{steps}_steps"


def train_supervised(quickstart: Path, seed: int) -> None:
    """Run the quick start up to its supervised model."""
    print(f"supervised model of seed {seed}", file=sys.stderr, flush=True)
    environment = os.environ | {"SEED": str(seed), "UNTIL": "sft", "BACKEND": "local", "PYTHON": sys.executable}
    command = ["bash", "examples/quickstart/run.sh", str(quickstart.absolute())]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=True)


def train(name: str, quickstart: Path, folder: Path, *, seed: int, steps: int) -> None:
    """Train one algorithm from its start; what an unfinished run left is removed."""
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run_grpo(quickstart, folder, steps=steps, changes=COMMON | CASES[name] | {"data.seed": seed, "trainer.seed": seed})


# -- results


def finished_curves(out: Path, name: str, seeds: Sequence[int], steps: int) -> list[Curve]:
    found = (read_curve(run_folder(out, name, seed, steps), steps) for seed in seeds)
    return [curve for curve in found if curve is not None]


def read_curve(folder: Path, steps: int) -> Curve | None:
    """Return the curve of a run, or None if it has not been validated after its last step."""
    file = folder / "metrics.jsonl"
    history = merge_steps(read_metrics(file)) if file.is_file() else []
    accuracy = {
        int(entry["step"]): value
        for entry in history
        for key, value in entry.items()
        if key.startswith("val-core/") and key.endswith("/mean@1")
    }
    if steps not in accuracy:
        return None
    timed = [entry for entry in history if "timing_s/step" in entry]
    seconds = [entry["timing_s/step"] - entry.get("timing_s/testing", 0.0) for entry in timed[SKIPPED_STEPS:] or timed]
    return Curve(accuracy, statistics.median(seconds))


def print_table(curves: dict[str, list[Curve]], *, steps: int) -> None:
    """Print rows of Markdown: mean over the seeds, and least and most in brackets."""
    marks = [step for step in (0, 3, 6, 9, 12, 18, 30) if step <= steps]
    titles = [*(f"step {mark}" if mark else "before" for mark in marks), f"steps to {GOAL}", "s/step"]
    print("| algorithm | seeds | " + " | ".join(titles) + " |")
    print("|---|" + "---|" * (len(titles) + 1))
    for name, runs in curves.items():
        cells = [spread([run.accuracy[mark] for run in runs], "{:.2f}".format) for mark in marks]
        cells.append(spread([run.steps_to_goal() for run in runs], "{:.0f}".format))
        cells.append(f"{min(run.step_s for run in runs):.1f}" if runs else "")
        print(f"| {name} | {len(runs)} | " + " | ".join(cells) + " |")


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    if not values:
        return ""
    return f"{form(statistics.mean(values))} ({form(min(values))}-{form(max(values))})"


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Draw one plot per algorithm: its mean and its range over the seeds.

    The grey line behind is the first algorithm's mean.
    """
    from matplotlib.figure import Figure  # without pyplot, which would look for a window system

    shown = {name: runs for name, runs in curves.items() if runs}
    columns = 5
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.2 * columns, 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    first, reference = next(iter(shown.items()))
    for axes, (name, runs) in zip(grid.flat, shown.items(), strict=False):
        steps = sorted(runs[0].accuracy)
        values = [[run.accuracy[step] for run in runs] for step in steps]
        if name != first:
            axes.plot(steps, [statistics.mean(run.accuracy[step] for run in reference) for step in steps], color="0.7")
        axes.fill_between(steps, list(map(min, values)), list(map(max, values)), alpha=0.25, linewidth=0)
        axes.plot(steps, list(map(statistics.mean, values)), "o-", markersize=3)
        axes.set_title(name, fontsize=10)
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    figure.supxlabel(f"step (grey: {first})", fontsize=9)
    figure.supylabel("held-out accuracy", fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
