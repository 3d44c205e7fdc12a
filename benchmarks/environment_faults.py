"""Training while a fifth of the environments fails: `python benchmarks/environment_faults.py`, 10 minutes on two cores.

Trains the example `two_agent_game` against the scripted player, twice from the same supervised model: with sound
environments, and with `--rate` of the episodes in which the process dies, hangs or answers nonsense
(`tests/support/serving/faulty_nim.py`). Prints reward and counts of both runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hybridrl.trainer.run.tracking import read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "two_agent_game"
FAULTY = ROOT / "tests" / "support" / "serving" / "faulty_nim.py"
SCORE, SAMPLES = "val-core/environment/reward/mean@8", 16 * 8
LEFT_OUT, FAILURES = "rollout/agent/samples_left_out", "rollout/agent/failures/"
HANG_S = 3.0  # a move takes a millisecond


def write_environments(path: Path, *, rate: float) -> Path:
    """Write the list of environments of a run. The tests of the policy are sound in both."""
    sound = {"class_name": f"{EXAMPLE / 'nim.py'}:Nim"}
    faulty = {"class_name": f"{FAULTY}:FaultyNim", "config": {"rate": rate}, "step_timeout_s": HANG_S}
    entries = [
        {"name": "nim", **(faulty if rate else sound)},
        {"name": "nim_test", **sound},
        {"name": "nim_table", **sound},
    ]
    path.write_text(json.dumps({"interaction": entries}))
    return path


def train(out: Path, *, rate: float, steps: int, sft_steps: int) -> list[dict]:
    """Run the example and return its metrics, one dict per row of its log."""
    run = f"rate_{rate:g}"
    environments = write_environments(out / f"{run}.json", rate=rate)
    variables = {"OPPONENT": "script", "STEPS": steps, "SFT_STEPS": sft_steps, "RUN": run, "ENVIRONMENTS": environments}
    variables |= {"BACKEND": "local", "PYTHON": sys.executable, "PYTHONPATH": ROOT}
    done = subprocess.run(
        ["bash", str(EXAMPLE / "run.sh"), str(out)],
        cwd=ROOT,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the run with rate {rate:g} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return read_metrics(out / run / "metrics.jsonl")


def table(runs: dict[float, list[dict]], *, steps: int) -> list[str]:
    """Return the lines of the table, one column per run."""
    rows = {"reward of the tests before": lambda rows: f"{_scores(rows)[0]:.3f}"}
    rows["reward of the tests after"] = lambda rows: f"{_scores(rows)[-1]:.3f}"
    rows["samples"] = lambda rows: str(steps * SAMPLES)
    rows["samples left out"] = lambda rows: f"{_total(rows, LEFT_OUT):.0f}"
    for name in sorted({name for rows_ in runs.values() for row in rows_ for name in row if name.startswith(FAILURES)}):
        rows[name.removeprefix(FAILURES)] = lambda rows, name=name: f"{_total(rows, name):.0f}"
    lines = ["| | " + " | ".join(f"rate of faults {rate:g}" for rate in runs) + " |", "|---" * (len(runs) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(cell(rows_) for rows_ in runs.values())} |" for name, cell in rows.items()]


def _scores(rows: list[dict]) -> list[float]:
    return [row[SCORE] for row in rows if SCORE in row]


def _total(rows: list[dict], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.2, help="share of faulty episodes (default: 0.2)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--sft-steps", type=int, default=150, help="steps of supervised fine-tuning (default: 150)")
    parser.add_argument("--out", type=Path, default=None, help="directory of the runs (default: a temporary one)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        sizes = {"steps": args.steps, "sft_steps": args.sft_steps}
        runs = {rate: train(out, rate=rate, **sizes) for rate in (0.0, args.rate)}
    print("\n".join(table(runs, steps=args.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
