"""What `trainer.overlap` saves: seconds per PPO step with stages one after the other, and with stages side by side.

Actor, reference and critic are on pools of one process each, or all on one pool. Every scoring call and every update
of a worker also sleeps, as a driver sees the work of a GPU: so two cores are enough for three pools. The reward is a
rule that sleeps. Both runs of a row have the same numbers, which the last column checks.

    python benchmarks/overlap.py [--steps 6] [--work 0.6] [--rule 0.9]
"""

import argparse
import contextlib
import functools
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from hybridrl import main_ppo
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.critic import CriticWorker
from tests.conftest import make_tiny_qwen2
from tests.support.end_to_end.runs import metrics, settings

SKIPPED_STEPS = 2  # the first steps include allocations and imports
TIMED = ("perf/", "timing", "reward/time_s", "cpu_s")  # what differs between two equal runs
ROWS = 12  # responses of a step, which the rule scores one after the other
STAGES = ("reward", "old_log_prob", "ref", "values", "update_critic", "update_actor")
SLOW = ("compute_log_prob", "compute_ref_log_prob", "compute_values", "update_actor", "update_critic")
RULE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    return len(set(solution_str)) / 10
"""
POOLS = {
    "three pools": {"policy": [Role.ActorRollout], "reference": [Role.RefPolicy], "critic": [Role.Critic]},
    "one pool": {"all": [Role.ActorRollout, Role.RefPolicy, Role.Critic]},
}


def slowed(cls: type, seconds: float) -> type:
    """Return the worker class with methods that take so much longer."""

    def slow(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            time.sleep(seconds)
            return method(*args, **kwargs)

        return call

    return type(cls.__name__, (cls,), {name: slow(getattr(cls, name)) for name in SLOW if hasattr(cls, name)})


def measure(folder: Path, model: Path, roles: dict[str, list[Role]], *, overlap: bool, arguments) -> list[dict]:
    """Run PPO, and return what the measured steps logged."""
    folder.mkdir()
    (folder / "rule.py").write_text(RULE.format(seconds=arguments.rule / ROWS))
    classes = {
        Role.ActorRollout: slowed(ActorRolloutRefWorker, arguments.work),
        Role.RefPolicy: slowed(ActorRolloutRefWorker, arguments.work),
        Role.Critic: slowed(CriticWorker, arguments.work),
    }
    mapping = {role: pool for pool, own in roles.items() for role in own}
    words = settings(
        folder,
        model,
        algorithm__adv_estimator="gae",
        algorithm__use_kl_in_reward="true",
        custom_reward_function__path=folder / "rule.py",
        reward_model__num_processes=1,
        trainer__backend="ray",
        trainer__overlap=str(overlap).lower(),
        trainer__save_freq=-1,
        trainer__snapshot_freq=0,
        trainer__test_freq=-1,
        trainer__val_before_train="false",
        trainer__logger="[jsonl]",
        trainer__total_training_steps=arguments.steps + SKIPPED_STEPS,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        code = main_ppo.main(
            words,
            workers=lambda config: classes,
            pools=lambda config, workers: ResourcePoolManager({pool: [1] for pool in roles}, mapping, use_gpu=False),
        )
    if code:
        sys.exit("the run failed")
    return [row for row in metrics(folder / "run") if row["step"] > SKIPPED_STEPS]


def numbers(rows: list[dict]) -> str:
    """Return what a run logged, without times."""
    return json.dumps([{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows], sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--work", type=float, default=0.6, help="seconds of every call that scores or updates")
    parser.add_argument("--rule", type=float, default=0.9, help="seconds of the rule for all responses of a step")
    arguments = parser.parse_args()
    print(f"median of {arguments.steps} steps; {arguments.work:g} s per call, {arguments.rule:g} s of rule")
    print(f"{'placement':<16}{'in turn, s':>12}{'overlap, s':>12}{'speed':>8}  numbers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_qwen2(folder / "model")
        for place, roles in POOLS.items():
            turn, beside = (
                measure(folder / f"{place} {overlap}", model, roles, overlap=overlap, arguments=arguments)
                for overlap in (False, True)
            )
            same = "equal" if numbers(turn) == numbers(beside) else "DIFFER"
            for stage in ("step", *STAGES):
                before, after = (statistics.median(row[f"timing_s/{stage}"] for row in rows) for rows in (turn, beside))
                label, end = (place, f"{before / after:>8.2f}  {same}") if stage == "step" else (f"  {stage}", "")
                print(f"{label:<16}{before:>12.2f}{after:>12.2f}{end}")


if __name__ == "__main__":
    main()
