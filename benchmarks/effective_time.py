"""Effective training time with n failures: `python benchmarks/effective_time.py [--runs 0 1 2 4] [--steps 24]`.

Measures real runs of GRPO on Ray with a tiny model: a fixed number of steps, and n processes killed in them, in turn
an actor in its update and a rollout in its generation. A step that runs again counts once, so for each run

    ETTR = useful / wall,   wall = useful + sum over failures (lost work + detection + restart).

The first step is left out, as the start of a run is. The model (`_effective_time.py`) predicts the ratio of each run
from the steps of the run without failures and from the failures of the other runs; the table has its error.

Then the model extrapolates to many GPUs, with published failure rates. What does not depend on the model is measured
(detection, start of processes); the rest is assumed, and a flag. Beside it are published ratios.

Runs are stored in --out/runs.jsonl; those that exist are not measured again. `--only-model` measures nothing.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._effective_time import GPUS_PER_NODE, Failure, Job, failures_per_hour, ratio_of_run  # noqa: E402
from tests.support.end_to_end.failing_runs import events, fault, hits, run_with  # noqa: E402

KILLS = (("actor", "update_actor", "update_actor"), ("rollout", "gen", "generate_sequences"))  # role, stage, call
SETTINGS = {
    "trainer__n_gpus_per_node": 1,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
    "trainer__save_freq": 4,
    "trainer__max_ckpt_to_keep": 2,
    "trainer__master": True,
}
HOURS_PER_DAY = 24
RATES = {  # failures per GPU-hour, and where they were published
    "RSC-2: 2.34 failures in 1000 node-days": (2.34e-3 / HOURS_PER_DAY / GPUS_PER_NODE, "arXiv:2410.21680"),
    "Llama 3: 419 unexpected interruptions in 54 days of 16384 GPUs": (
        419 / (54 * HOURS_PER_DAY * 16384),
        "arXiv:2407.21783",
    ),
    "RSC-1: 6.50 failures in 1000 node-days": (6.50e-3 / HOURS_PER_DAY / GPUS_PER_NODE, "arXiv:2410.21680"),
    "RSC-1: jobs of 1024 GPUs fail every 7.9 h": (1 / 7.9 / 1024, "arXiv:2410.21680"),
}
PUBLISHED = (  # who, job, ratio, where
    ("Llama 3 405B", "pre-training, 16384 GPUs, 54 days", "> 0.90", "arXiv:2407.21783"),
    ("MegaScale", "pre-training, > 10000 GPUs, several weeks", "> 0.90", "arXiv:2402.15627"),
    ("Kokolis et al.", "jobs of more than 1024 GPUs on RSC-1", "about 0.9", "arXiv:2410.21680"),
    ("ByteRobust", "pre-training, 9600 GPUs, three months", "0.97", "arXiv:2509.16293"),
    ("DLRover", "GLM-65B, thousands of GPUs, goodput without and with it", "0.69, 0.95", "DLRover's README"),
    ("RobustRL", "RL of Qwen3-8B, 256 GPUs, injected failures of 10 %", "> 0.80", "arXiv:2512.22492"),
    ("ByteRobust, by RobustRL's authors", "the same", "0.60", "arXiv:2512.22492"),
)
NUM_GPUS = (8, 64, 256, 1000, 4096, 16384)
SAVE_FREQS = (1, 2, 5, 10, 20)


@dataclass(frozen=True)
class Run:
    """A measured run.

    Attributes:
        wall_s: From the start of step 2 to the start of the last one.
        useful_s: Of it, steps that counted.
        start_s: From the command to the first step.
    """

    num_failures: int
    wall_s: float
    useful_s: float
    start_s: float
    failures: tuple[Failure, ...]

    @property
    def ratio(self) -> float:
        return self.useful_s / self.wall_s


def measure(num_failures: int, *, steps: int, out: Path) -> Run:
    """Run `steps` steps with this many failures."""
    from tests.conftest import make_tiny_qwen2

    model = out / "model"
    if not model.is_dir():
        model.mkdir(parents=True)
        make_tiny_qwen2(model)
    places = [2 + round((number + 0.5) * (steps - 3) / num_failures) for number in range(num_failures)]
    planted = [
        fault(step, stage, role, method=method, after_s=0.01)
        for step, (role, stage, method) in zip(places, KILLS * num_failures, strict=False)
    ]
    folder, start = out / f"n{num_failures}-{time.time():.0f}", time.time()
    changes = SETTINGS | {"trainer__total_training_steps": steps}
    done = run_with(folder, model, *planted, timeout_s=3600, **changes)
    if done.returncode:
        sys.exit(f"the run with {num_failures} failures ended with code {done.returncode}:\n{done.stderr}")
    return read_run(folder, start=start, steps=steps)


def read_run(folder: Path, *, start: float, steps: int) -> Run:
    """Return the times of a run from its log of events."""
    attempts: dict[int, list[float]] = {}
    for stage in events(folder, "stage"):
        if stage["name"] == "next_batch":
            attempts.setdefault(stage["step"], []).append(stage["at"])
    known = [entry["at"] for entry in events(folder, "said") if " was lost in " in entry["text"]]
    failures = []
    for hit in hits(folder):
        tries = attempts[hit["step"]]
        again = next(at for at in tries if at > hit["at"])
        detected = min((at for at in known if at >= hit["at"]), default=again)
        failures.append(
            Failure(
                lost_work_s=hit["at"] - max(at for at in tries if at < hit["at"]),
                detection_s=detected - hit["at"],
                restart_s=again - detected,
            )
        )
    counted = range(2, steps)
    useful_s = sum(attempts[step + 1][0] - attempts[step][-1] for step in counted)
    wall_s = attempts[steps][0] - attempts[2][0]
    return Run(len(failures), wall_s, useful_s, attempts[1][0] - start, tuple(failures))


def predicted_ratio(run: Run, runs: list[Run]) -> float | None:
    """Return the ratio that the other runs imply: their failures, and the steps of the one without failures."""
    calm = next((other for other in runs if other.num_failures == 0), None)
    others = [failure for other in runs if other is not run for failure in other.failures]
    if calm is None or (run.num_failures and not others):
        return None
    return ratio_of_run(calm.useful_s, [mean_of(others)] * run.num_failures)


def mean_of(failures: list[Failure]) -> Failure:
    means = {
        field.name: statistics.mean(getattr(failure, field.name) for failure in failures) for field in fields(Failure)
    }
    return Failure(**means)


def print_measured(runs: list[Run]) -> None:
    print(
        "| failures | wall, s | failures per hour | lost work, s | detection, s | restart, s | ETTR | model | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for run in runs:
        mean = mean_of(list(run.failures)) if run.failures else None
        parts = [f"{mean.lost_work_s:.2f}", f"{mean.detection_s:.2f}", f"{mean.restart_s:.1f}"] if mean else ["-"] * 3
        model = predicted_ratio(run, runs)
        error = ["-", "-"] if model is None else [f"{model:.3f}", f"{model - run.ratio:+.3f}"]
        rate = f"{run.num_failures / run.wall_s * 3600:.0f}"
        cells = [f"{run.num_failures}", f"{run.wall_s:.0f}", rate, *parts, f"{run.ratio:.3f}", *error]
        print(f"| {' | '.join(cells)} |")
    print(f"start of a run, median: {statistics.median(run.start_s for run in runs):.1f} s\n")


def print_extrapolated(job: Job) -> None:
    print(", ".join(f"{name} {value:g}" for name, value in asdict(job).items()))
    for name, failure in (("process", job.process()), ("machine", job.machine())):
        print(f"a lost {name} costs {failure.cost_s:.0f} s: {asdict(failure)}")
    print(f"\n| failure rate | {' | '.join(f'{n} GPUs' for n in NUM_GPUS)} | source |\n|{'---|' * (len(NUM_GPUS) + 2)}")
    for name, (rate, source) in RATES.items():
        ratios = " | ".join(cell(job.ratio(rate, n)) for n in NUM_GPUS)
        print(f"| {name} ({failures_per_hour(rate, 1000):.3f} per hour of 1000 GPUs) | {ratios} | {source} |")
    print(f"\n| 1000 GPUs, `save_freq` | {' | '.join(str(n) for n in SAVE_FREQS)} |\n|{'---|' * (len(SAVE_FREQS) + 1)}")
    for name, (rate, _) in RATES.items():
        ratios = " | ".join(cell(replace(job, save_freq=n).ratio(rate, 1000)) for n in SAVE_FREQS)
        print(f"| {name.partition(':')[0]} | {ratios} |")
    print("\n| published | job | ETTR | source |\n|---|---|---|---|")
    for row in PUBLISHED:
        print(f"| {' | '.join(row)} |")


def cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def stored(path: Path) -> list[Run]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [run_of(json.loads(line)) for line in lines]


def run_of(row: dict[str, Any]) -> Run:
    return Run(**row | {"failures": tuple(Failure(**failure) for failure in row["failures"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", type=int, nargs="*", default=[0, 1, 2, 4], help="failures of each run")
    add("--steps", type=int, default=24)
    add("--out", type=Path, default=Path("outputs/effective_time"))
    add("--only-model", action="store_true", help="measure nothing")
    add("--bytes-per-gpu", type=float, default=10e9, help="assumed (default: %(default)g)")
    add("--memory-bytes-per-s", type=float, default=5e9, help="assumed (default: %(default)g)")
    add("--storage-bytes-per-s", type=float, default=0.25e9, help="assumed (default: %(default)g)")
    add("--step-s", type=float, default=300.0, help="assumed (default: %(default)g)")
    add("--save-freq", type=int, default=10, help="trainer.save_freq (default: %(default)d)")
    add("--detection-s", type=float, default=4.7, help="measured, slowest of docs/figures.md (default: %(default)g)")
    add("--process-start-s", type=float, default=15.1, help="measured, the same (default: %(default)g)")
    add("--engine-start-s", type=float, default=120.0, help="assumed (default: %(default)g)")
    add("--machine-detection-s", type=float, default=5.6, help="measured, docs/figures.md (default: %(default)g)")
    add("--job-start-s", type=float, default=30.0, help="assumed (default: %(default)g)")
    add("--replacement-s", type=float, default=300.0, help="assumed (default: %(default)g)")
    add("--machine-share", type=float, default=0.78, help="arXiv:2407.21783 (default: %(default)g)")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "runs.jsonl"
    for num_failures in [] if options.only_model else options.runs:
        if num_failures in (run.num_failures for run in stored(path)):
            continue
        run = measure(num_failures, steps=options.steps, out=out)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
    if runs := stored(path):
        print_measured(runs)
    print_extrapolated(Job(**{field.name: getattr(options, field.name) for field in fields(Job)}))


if __name__ == "__main__":
    main()
