"""Learning with quantised weights in the rollout: float32, fp8 without and with importance weights, and int4.

    make train && python -m benchmarks.low_precision                     prints a row for each
    python -m benchmarks.low_precision --steps 60 --runs float32 fp8     some of them

GRPO of the quick start, the same seed and prompts in every run, with the `hf` rollout, which computes with the numbers
of the quantised weights. The importance weights are token-level, at most 2 (`decoupled_token_is`). Rewards are means of
the first and the last tenth of the steps; the difference is the mean of |log-prob of rollout - trainer| over tokens, of
all steps.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._quickstart import run_grpo, sft_model

QUANTIZATION, PRESET = "actor_rollout_ref.rollout.quantization", "algorithm.rollout_correction.preset"
WEIGHTED = {PRESET: "decoupled_token_is"}
RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "fp8": {QUANTIZATION: "fp8"},
    "fp8, weighted": {QUANTIZATION: "fp8", **WEIGHTED},
    "int4": {QUANTIZATION: "int4"},
    "int4, weighted": {QUANTIZATION: "int4", **WEIGHTED},
}
REWARD, DIFFERENCE = "critic/score/mean", "training/rollout_log_probs_diff_mean"


def row(name: str, history: Sequence[dict]) -> str:
    """Return a row of the table, of a run's metrics."""
    rewards = [entry[REWARD] for entry in history if REWARD in entry]
    differences = [entry[DIFFERENCE] for entry in history if DIFFERENCE in entry]
    tenth = max(1, len(rewards) // 10)
    validation = [value for entry in history for key, value in entry.items() if key.startswith("val-core/")]
    cells = [
        f"{statistics.mean(rewards[:tenth]):.3f}",
        f"{statistics.mean(rewards[-tenth:]):.3f}",
        f"{validation[-1]:.3f}" if validation else "",
        f"{statistics.mean(differences):.1e}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    chosen = parser.parse_args(argv)
    if not sft_model(chosen.quickstart).is_dir():
        print(f"{chosen.quickstart} has no model: `make train` writes it")
        return 1
    print(
        "| weights of the rollout | reward, first | last | validation | difference |\n|---|---|---|---|---|", flush=True
    )
    for name in chosen.runs:
        with tempfile.TemporaryDirectory() as folder:
            changes = {"trainer.backend": "local", "trainer.device": "cpu", "trainer.test_freq": chosen.steps}
            history = run_grpo(chosen.quickstart, Path(folder), steps=chosen.steps, changes=changes | RUNS[name])
        print(row(name, history), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
