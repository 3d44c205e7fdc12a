"""Draw the curves of a run, by default docs/learning_curve.png from the metrics of `make train`.

python benchmarks/learning_curve.py [outputs/quickstart/grpo] [--out docs/learning_curve.png]
"""

import argparse
from pathlib import Path

from examples.megatron.compare import moving_average
from hybridrl.trainer.run.report import merge_steps, series
from hybridrl.trainer.run.tracking import METRICS_FILE, read_metrics

VALIDATION = "reward/mean@"  # after val-core/ and the name of the data, before the samples of each prompt
PANELS = {  # title and unit -> metric and label of each curve
    ("Reward and validation", "reward"): (
        ("critic/score/mean", "training reward"),
        (VALIDATION, "validation"),
    ),
    ("Response length", "tokens"): (("response_length/mean", "mean length"),),
    ("Entropy and KL", "nats"): (("actor/entropy", "entropy"), ("actor/ppo_kl", "KL to old policy")),
    ("Step time", "seconds"): (
        ("perf/time_per_step", "step"),
        ("timing_s/gen", "generation"),
        ("timing_s/update_actor", "update of the actor"),
    ),
}
WIDTH = 11  # steps of the moving average


def draw(history: list[dict], out: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot, which would look for a window system

    figure = Figure(figsize=(12.8, 8), layout="constrained")
    for axes, ((title, unit), curves) in zip(figure.subplots(2, 2).flatten(), PANELS.items(), strict=True):
        for name, label in curves:
            steps, values = series(history, validation_metric(history) if name == VALIDATION else name)
            if len(steps) < WIDTH:  # validations
                axes.plot(steps, values, "o-", label=label)
            else:
                [line] = axes.plot(steps, moving_average(values, WIDTH), label=label)
                axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=1)
        axes.set(title=title, ylabel=unit, xlabel="training step", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=130)


def validation_metric(history: list[dict]) -> str:
    """Return the name of the run's validation reward, the first one if there are several data sources."""
    names = {name for entry in history for name in entry if name.startswith("val-core/")}
    return min((name for name in names if VALIDATION in name), default=VALIDATION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("outputs/quickstart/grpo"))
    parser.add_argument("--out", type=Path, default=Path("docs/learning_curve.png"))
    arguments = parser.parse_args()
    if not (arguments.run / METRICS_FILE).exists():
        print(f"{arguments.run} has no metrics: `make train` writes them")
        return
    draw(merge_steps(read_metrics(arguments.run / METRICS_FILE)), arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
