"""Draw the curves of `examples/dpo/run.sh`: `python -m examples.dpo.curves OUT FIGURE.png`.

Reads `metrics.jsonl` of the runs `dpo` and `rm` under OUT: loss and accuracy, in training (moving average) and on the
held-out pairs, and for DPO the implicit rewards.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WINDOW = 10  # steps of the moving average
BLUE, ORANGE, GREY = "#1f6fb4", "#d95f02", "#6b6b6b"


def read(run: Path) -> list[dict]:
    """Return the logged steps of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(axis, history: list[dict], name: str, *, colour: str, label: str, smooth: bool = True) -> None:
    """Draw one metric over the steps in which it was logged."""
    points = [(row["step"], row[name]) for row in history if name in row]
    steps, values = [step for step, _ in points], [value for _, value in points]
    if smooth:
        parts = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
        values = [sum(part) / len(part) for part in parts]
    axis.plot(steps, values, color=colour, label=label, marker="" if smooth else "o", markersize=3)


def main(out: Path, figure: Path) -> None:
    """Write the figure."""
    chart, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for row, (run, title) in zip(axes, (("dpo", "DPO"), ("rm", "reward model")), strict=True):
        history = read(out / run)
        for axis, name, what in ((row[0], "loss", "loss"), (row[1], "rewards/accuracies", "accuracy")):
            trained = "train/loss" if name == "loss" else name
            draw(axis, history, trained, colour=GREY, label=f"training, mean of {WINDOW} steps")
            draw(axis, history, f"val/{name}", colour=BLUE, label="held-out pairs", smooth=False)
            axis.axhline(0.693 if name == "loss" else 0.5, color="black", linewidth=0.6, linestyle=":")
            axis.set_title(f"{title}: {what}")
        draw(row[2], history, "val/rewards/chosen", colour=BLUE, label="chosen", smooth=False)
        draw(row[2], history, "val/rewards/rejected", colour=ORANGE, label="rejected", smooth=False)
        row[2].set_title(f"{title}: mean reward, held-out pairs")
        for axis in row:
            axis.set_xlabel("step")
            axis.legend(fontsize=8)
    chart.savefig(figure, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
