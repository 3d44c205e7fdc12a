"""Plot the curves of two or more runs in one picture, and print final accuracies and differences from the first run.

    python -m examples.megatron.compare outputs/megatron/fsdp outputs/megatron/megatron --out curves.png

Reads each directory's metrics.jsonl. A run is named after its directory.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridrl.trainer.run.report import merge_steps, series
from hybridrl.trainer.run.tracking import METRICS_FILE, read_metrics

PANELS = (
    ("critic/score/mean", "Training reward", "mean score"),
    ("actor/entropy", "Entropy", "nats"),
    ("actor/grad_norm", "Gradient norm", ""),
    ("response_length/mean", "Response length", "tokens"),
    ("training/rollout_probs_diff_max", "Trainer and rollout", "largest difference of a token's probability"),
)
NO_AVERAGE = "training/rollout_probs_diff_max"  # a largest value is not noise
LINES = ("-", "--", ":", "-.")  # curves on top of each other stay visible
WIDTH = 7  # steps of the moving average


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Return the mean over `width` (made odd) values around each one.

    At the start, where curves are steep, the window shrinks on both sides. At the end it keeps all values before, so
    that the noise of one step is not mistaken for the result.
    """
    half = width // 2
    windows = (values[max(0, i - half) : i + min(i, half) + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def accuracy(history: list[dict]) -> tuple[list[int], list[float]]:
    """Return steps and values of the held-out accuracy."""
    name = next(name for row in history for name in row if name.startswith("val-core/") and name.endswith("mean@1"))
    return series(history, name)


def draw(runs: dict[str, list[dict]], out: Path) -> None:
    """Write the picture: held-out accuracy, and the panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 3).flatten()
    for (run, history), line in zip(runs.items(), LINES, strict=False):
        grid[0].plot(*accuracy(history), line, marker="o", markersize=4, label=run)
        for axes, (name, _, _) in zip(grid[1:], PANELS, strict=False):
            steps, values = series(history, name)
            axes.plot(steps, values if name == NO_AVERAGE else moving_average(values, WIDTH), line, label=run)
    for axes, (_, title, unit) in zip(grid, (("", "Held-out accuracy", "share of problems"), *PANELS), strict=False):
        axes.set(title=title, ylabel=unit, xlabel="training step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=110)


def describe(run: str, history: list[dict]) -> str:
    _, values = accuracy(history)
    return f"{run}: held-out accuracy {values[0]:.3f} before, {values[-1]:.3f} after"


def distance(history: list[dict], other: list[dict]) -> str:
    """Return the largest difference of each metric at the same step."""
    found = []
    for name, title, _ in PANELS:
        ours, theirs = (dict(zip(*series(rows, name), strict=True)) for rows in (history, other))
        found.append(
            f"{title.lower()} {max(abs(ours[step] - theirs[step]) for step in ours.keys() & theirs.keys()):.1e}"
        )
    return ", ".join(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs, four at most")
    parser.add_argument("--out", type=Path, required=True, help="the picture, a .png")
    args = parser.parse_args(argv)
    runs = {folder.name: merge_steps(read_metrics(folder / METRICS_FILE)) for folder in args.runs}
    draw(runs, args.out)
    for run, history in runs.items():
        print(describe(run, history))
    first, *others = runs
    for run in others:
        print(f"largest differences of {run} from {first}: {distance(runs[first], runs[run])}")
    print(f"curves: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
