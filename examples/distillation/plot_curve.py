"""Draw held-out accuracy over steps of distillation runs, with the teacher's as a line.

python -m examples.distillation.plot_curve curve.png 0.977 "new student, forward KL=RUN_DIRECTORY" ...
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture")
    parser.add_argument("teacher", type=float, help="accuracy of the teacher")
    parser.add_argument("runs", nargs="+", help="label=directory of a run")
    arguments = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.axhline(arguments.teacher, color="gray", linestyle="--", label=f"teacher, {100 * arguments.teacher:.1f} %")
    for run in arguments.runs:
        label, _, directory = run.rpartition("=")
        points = validation_accuracy(Path(directory))
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="held-out accuracy, greedy", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(arguments.picture, dpi=130)


def validation_accuracy(directory: Path) -> list[tuple[int, float]]:
    """Return (step, accuracy) of every validation of a run."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        (row["step"], value)
        for row in rows
        for name, value in row.items()
        if name.startswith("val-core/") and name.endswith("/reward/mean@1")
    ]


if __name__ == "__main__":
    main()
