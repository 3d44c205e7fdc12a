"""Print what the parity gate finds, and what it costs a run:

    python benchmarks/parity_gate.py [RUN_DIR ...]

Each fault is planted into the `hf` rollout of a tiny model: the fingerprints stay equal. RUN_DIR: of a finished run,
for the seconds of its checks beside those of its steps.
"""

import logging
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the planted faults, which the tests share

from transformers import AutoTokenizer  # noqa: E402

from hybridrl.errors import ParityError  # noqa: E402
from hybridrl.trainer.run.report import merge_steps  # noqa: E402
from hybridrl.trainer.run.tracking import read_metrics  # noqa: E402
from tests.conftest import make_tiny_qwen2  # noqa: E402
from tests.support.third_party import misreading_rollouts  # noqa: E402
from tests.trainer.ppo.policy.test_parity_gate import FAULTS, Policy, save_model  # noqa: E402


def found(fault: str, family: str, folder: Path) -> tuple[float, bool]:
    """Return the mean difference of log-probs that a fault makes, and whether the gate stops the run."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_qwen2(folder / "tokenizer"))
    model = save_model(folder / "model", tokenizer, family)
    rollout = {"actor_rollout_ref__rollout__name": f"{misreading_rollouts.__name__}:{fault}"}
    policy = Policy(folder, model, tokenizer, **rollout)
    try:
        policy.pipeline.push_weights(0)
    except ParityError:
        return policy.gate.metrics["parity/log_prob_diff_mean"], True
    return policy.gate.metrics["parity/log_prob_diff_mean"], False


def cost(run: Path) -> str:
    """Return a line of the table of costs."""
    rows = merge_steps(read_metrics(run / "metrics.jsonl"))
    checks = [row["parity/time_s"] for row in rows if "parity/time_s" in row]
    steps = sum(row["timing_s/step"] for row in rows if "timing_s/step" in row)
    return f"| {run.name} | {len(rows)} | {len(checks)} | {sum(checks):.2f} | {steps:.1f} | {sum(checks) / steps:.2%} |"


def main() -> None:
    logging.disable(logging.WARNING)
    print("| planted | model | mean difference of log-probs | stops the run |\n|---|---|---|---|")
    for fault, family in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            difference, stops = found(fault, family, Path(folder))
        print(f"| {fault} | {family} | {difference:.1e} | {'yes' if stops else 'no'} |", flush=True)
    if runs := sys.argv[1:]:
        print("\n| run | steps | checks | seconds of checks | of steps | share |\n|---|---|---|---|---|---|")
        for run in runs:
            print(cost(Path(run)))


if __name__ == "__main__":
    main()
