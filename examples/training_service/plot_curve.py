"""Draw the share of right answers over the steps of `math_rl` runs.

python -m examples.training_service.plot_curve curve.png "importance_sampling=LOG_PATH" ...
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture")
    parser.add_argument("runs", nargs="+", help="label=log_path of a run")
    arguments = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in arguments.runs:
        label, _, directory = run.rpartition("=")
        axes.plot(*zip(*right_answers(Path(directory)), strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="right answers of the step's samples", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(arguments.picture, dpi=130)


def right_answers(directory: Path) -> list[tuple[int, float]]:
    """Return (step, share of right answers) of each step of a run."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["env/all/correct"]) for row in rows if "env/all/correct" in row]


if __name__ == "__main__":
    main()
