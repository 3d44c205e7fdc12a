"""Time of one GRPO step split by stage, on one and on two ranks, and the controller's share of it.

The controller's share is the rest of a step: submission, transfer, waiting, advantages and bookkeeping. Not in it: the
time inside the workers' methods (generation, forward, backward, weight push) and the reward function.

    python benchmarks/step_time.py [--steps 10] [--rows 32] [--n 8]
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hybridrl import main_ppo
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.run.report import merge_steps
from hybridrl.trainer.run.tracking import read_metrics

SKIPPED_STEPS = 2  # the first steps include allocations and imports
STAGES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")


class MeasuredTrainer(RayPPOTrainer):
    """Logs the seconds of a step in which workers were busy: per method, those of its slowest rank."""

    def next_batch(self, ctx):
        self.before = self.policy.actor.busy_seconds()
        super().next_batch(ctx)

    def log(self, ctx):
        super().log(ctx)
        ranks = list(zip(self.policy.actor.busy_seconds(), self.before, strict=True))
        busy = sum(max(now[method] - before.get(method, 0.0) for now, before in ranks) for method in ranks[0][0])
        self.tracking.log({"busy_s": busy}, self.global_steps)


def prepare(folder: Path) -> None:
    run = [sys.executable, "-m"]
    subprocess.run(
        [*run, "data_preprocess.arithmetic", "--local_dir", folder / "data"], check=True, capture_output=True
    )
    build = ["examples.quickstart.build_model", "--data", folder / "data", "--out", folder / "model"]
    subprocess.run([*run, *build], check=True, capture_output=True)


def measure(folder: Path, *, ranks: int, arguments: argparse.Namespace) -> list[dict]:
    out = folder / f"run_{ranks}"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data/train.parquet",
        "data.train_batch_size": arguments.rows,
        "data.max_prompt_length": 64,
        "data.max_response_length": 26,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": arguments.rows,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": arguments.n,
        "trainer.n_gpus_per_node": ranks,
        "trainer.num_threads": 1,
        "trainer.total_training_steps": arguments.steps + SKIPPED_STEPS,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": out,
        "trainer.resume_mode": "disable",
    }
    with contextlib.redirect_stdout(io.StringIO()):  # keep the run's own report out of the table
        code = main_ppo.main([f"{k}={v}" for k, v in settings.items()], trainer_cls=MeasuredTrainer)
    if code:
        sys.exit("the run failed")
    return merge_steps(read_metrics(out / "metrics.jsonl"))[SKIPPED_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=32, help="prompts per step")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        print(f"{arguments.rows} prompts x {arguments.n} samples; median of {arguments.steps} steps, milliseconds")
        print("ranks " + " ".join(f"{stage:>14}" for stage in STAGES) + f" {'step':>8} {'controller':>11}")
        for ranks in (1, 2):
            rows = measure(folder, ranks=ranks, arguments=arguments)
            stages = [statistics.median(row.get(f"timing_s/{stage}", 0.0) for row in rows) * 1e3 for stage in STAGES]
            step = statistics.median(row["timing_s/step"] for row in rows)
            outside = [1 - (row["busy_s"] + row["timing_s/reward"]) / row["timing_s/step"] for row in rows]
            print(
                f"{ranks:5d} "
                + " ".join(f"{s:14.1f}" for s in stages)
                + f" {step * 1e3:8.1f} {statistics.median(outside):10.1%}"
            )


if __name__ == "__main__":
    main()
