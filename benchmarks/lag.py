"""Gain and cost of generating ahead: `python benchmarks/lag.py` after `make train` (uses its data and its SFT model).

Runs the quick start's GRPO with one trainer process and one rollout process, in these cases:

- lag 0, 1 and 4, with and without importance weights for the older samples,
- partial rollouts,
- a quarter more samples from a replay buffer.

For each case the table has

- seconds per step (median) and the speed relative to lag 0,
- the bound that the times of lag 0 allow (generation and push fully overlapped with the rest),
- the reward over the run at equal numbers of new samples,
- the final accuracy on held-out problems.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from _quickstart import run_grpo, sft_model

SKIPPED_STEPS = 3  # the first steps include allocations and imports
CASES = {
    "lag 0": {},
    "lag 1": {"trainer.lag": 1},
    "lag 1, weighted": {"trainer.lag": 1, "algorithm.rollout_correction.rollout_is": "token"},
    "lag 0, replay": {
        "trainer.replay.groups": 8,
        "trainer.staleness": 4,
        "algorithm.rollout_correction.rollout_is": "token",
    },
    "lag 4": {"trainer.lag": 4},
    "lag 4, weighted": {"trainer.lag": 4, "algorithm.rollout_correction.rollout_is": "token"},
    "lag 4, partial, weighted": {
        "trainer.lag": 4,
        "trainer.partial_rollout": True,
        "actor_rollout_ref.rollout.mode": "async",
        "algorithm.rollout_correction.rollout_is": "token",
    },
}


def seconds(history: list[dict], name: str) -> float:
    """Return the median over steps, without the validation in the last step."""
    return statistics.median(entry[name] - entry.get("timing_s/testing", 0.0) for entry in history[SKIPPED_STEPS:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, default=Path("outputs/quickstart"), help="what `make train` wrote")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if not sft_model(options.quickstart).is_dir():
        sys.exit(f"no SFT model under {options.quickstart}: run `make train` first, or give --quickstart DIR")
    marks = [round(options.steps * share) for share in (0.25, 0.5, 0.75, 1)]
    print(
        f"{'':<26}{'s/step':>8}{'speed':>7}{'bound':>7}{'age':>6}  reward up to step "
        + " ".join(f"{m:>5}" for m in marks)
        + "  accuracy"
    )
    baseline = bound = 0.0
    for name, changes in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            own_pool = {"actor_rollout_ref.rollout.n_gpus_per_node": 1, "trainer.test_freq": options.steps}
            history = run_grpo(options.quickstart, Path(folder), steps=options.steps, changes=own_pool | changes)
        step = seconds(history, "timing_s/step")
        if not changes:
            rollout = seconds(history, "timing_s/gen") + seconds(history, "timing_s/update_weights")
            baseline, bound = step, step / max(rollout, step - rollout)
        rewards = [statistics.mean(e["critic/score/mean"] for e in history[max(0, m - 10) : m]) for m in marks]
        accuracy = next(value for key, value in history[-1].items() if key.startswith("val-core/"))
        age = statistics.mean(entry.get("async/age_mean", 0.0) for entry in history[-10:])
        numbers = " ".join(f"{reward:>5.2f}" for reward in rewards)
        print(
            f"{name:<26}{step:>8.3f}{baseline / step:>7.2f}{bound if changes else 1:>7.2f}{age:>6.1f}  "
            f"{'':<18}{numbers}  {accuracy:>8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
