"""Write the closing report of a run.

A picture of its learning curves, and lines with first and last values.

Called by `main_ppo` and `main_sft` at the end, in the driver. Reads only logged metrics and examples.
"""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.trainer.run.console import VALIDATION_LOSS, split_validation_name
from hybridrl.trainer.run.metrics import MFU_NAMES
from hybridrl.trainer.run.samples import format_answer, format_prompt, read_examples
from hybridrl.trainer.run.tracking import METRICS_FILE, TENSORBOARD_DIRECTORY, read_metrics

logger = logging.getLogger(__name__)
History = Sequence[Mapping[str, float]]
Series = tuple[list[int], list[float]]  # steps, values
CURVE_FILE = "learning_curve.png"
MIN_SHARE = 0.01  # of a step's time, for a stage to be listed
SMOOTHING = 0.1  # width of the moving average over a noisy curve, as a share of the steps
COLOURS = ("#1f6fb4", "#d95f02", "#2a9d5c", "#8e5bb0", "#c0392b", "#6b6b6b")


@dataclass(frozen=True)
class Panel:
    """One plot: (metric, label) of its curves, for the left and the right axis."""

    title: str
    left: tuple[tuple[str, str], ...]
    left_label: str
    right: tuple[tuple[str, str], ...] = ()
    right_label: str = ""
    from_zero: bool = False  # start the left axis at zero, to compare parts of a whole


PANELS = (
    Panel(
        "Response length",
        (("response_length/mean", "mean length"),),
        "tokens",
        (("response_length/clip_ratio", "cut at the limit"),),
        "share of responses",
    ),
    Panel(
        "Entropy and KL",
        (("actor/entropy", "entropy"),),
        "entropy (nats)",
        (
            ("actor/reward_kl_penalty", "KL to reference"),
            ("actor/kl_loss", "KL loss"),
            ("actor/ppo_kl", "KL to old policy"),
        ),
        "KL (nats)",
    ),
    Panel(
        "Step time",
        (
            ("perf/time_per_step", "step"),
            ("timing_s/gen", "generation"),
            ("timing_s/update_actor", "update of the actor"),
        ),
        "seconds",
        from_zero=True,
    ),
)


def report_run(
    directory: str | Path, *, checkpoint: str | None, written: Mapping[str, str | None] | None = None
) -> str:
    """Draw the curves of the run that wrote to `directory`, and return its closing lines.

    Args:
        directory: The run's directory.
        checkpoint: Path of the run's newest checkpoint.
        written: Other outputs of the run, name -> path; None if the run did not write it.
    """
    directory = Path(directory).absolute()
    metrics = directory / METRICS_FILE
    history = read_metrics(metrics) if metrics.exists() else []
    curves = _try_to_draw(directory, history)
    outputs = {
        "last checkpoint": checkpoint or "none: trainer.save_freq=N commits every N steps and at the end",
        "metrics": metrics if history else "not stored: add jsonl to trainer.logger for metrics and learning curves",
        "learning curve": curves[0] if curves else None,
        "TensorBoard": directory / TENSORBOARD_DIRECTORY if (directory / TENSORBOARD_DIRECTORY).exists() else None,
    } | dict(written or {})
    lines = [
        final_report(history, written={what: where for what, where in outputs.items() if where}),
        *_examples(directory, history),
    ]
    return "\n".join(lines) + "\n"


def _try_to_draw(directory: Path, history: History) -> list[Path]:
    """Return the pictures that were drawn. A full disk must not fail a run that has committed its last step."""
    try:
        return write_report(directory, history, title=f"{directory.parent.name}/{directory.name}")
    except OSError as error:
        path = directory / CURVE_FILE
        logger.warning("%s: cannot be drawn (%s)", path, error.strerror or error)
        with suppress(OSError):
            path.unlink(missing_ok=True)  # half of a picture
        return []


def _examples(directory: Path, history: History) -> list[str]:
    """Return, per data source, the first and last answer to the same problem."""
    steps = {step for curve in _validation_curves(merge_steps(history)).values() for step in curve[0]}
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for example in read_examples(directory):
        if example["step"] in steps:
            by_source.setdefault(example["data_source"], []).append(example)
    lines = []
    for first, *others in by_source.values():
        lines += [format_prompt(first), *(f"  {format_answer(example)}" for example in [first, *others[-1:]])]
    return lines


def write_report(directory: str | Path, history: History | str | Path, *, title: str = "") -> list[Path]:
    """Draw the curves of a run into `directory`/learning_curve.png, and return the paths written.

    Args:
        directory: Where to write.
        history: The logged metrics, each entry with its `step`, or the path of a metrics.jsonl. Panels without data are
            omitted; without any data nothing is written.
        title: Of the picture.
    """
    merged = merge_steps(load_history(history))
    panels = [panel for panel in PANELS if _curves(merged, panel.left + panel.right)]
    has_progress = bool(_training_curve(merged) or _validation_curves(merged))
    if not panels and not has_progress:
        return []
    path = Path(directory) / CURVE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    _draw(merged, panels, path, title=title, has_progress=has_progress)
    return [path]


def final_report(history: History | str | Path, *, written: Mapping[str, str | Path] | None = None) -> str:
    """Return the closing lines of a run: its outputs, then first and last values.

    The values are the training reward or loss and every core validation metric.

    Args:
        history: As for `write_report`.
        written: Name -> path of the outputs, in the order to show.
    """
    merged = merge_steps(load_history(history))
    lines = [f"{what}: {path}" for what, path in (written or {}).items()]
    if curve := _training_curve(merged):
        label, points = curve
        lines.append(_change(f"training {label}, mean of the first and last tenth", _ends(points)))
    names = dict.fromkeys(
        name for entry in merged for name in entry if name.startswith("val-core/") or name == VALIDATION_LOSS
    )
    lines += [
        _change(
            f"validation {' '.join(split_validation_name(name))}" if "val-core/" in name else name, series(merged, name)
        )
        for name in names
    ]
    return "\n".join([*lines, *stage_lines(merged)])


def load_history(history: History | str | Path) -> History:
    """Return the entries themselves, or those of a metrics.jsonl."""
    return read_metrics(history) if isinstance(history, str | Path) else history


def merge_steps(history: History) -> list[dict[str, float]]:
    """Return one entry per step in ascending order; if a step was logged twice, later values count.

    Results of a remote evaluation are assigned to the step of its weights (`val/version`), not to the step that logged
    them.
    """
    steps: dict[int, dict[str, float]] = {}
    for entry in history:
        evaluated_step = int(entry.get("val/version", entry["step"]))
        found = (
            {name: value for name, value in entry.items() if name.startswith("val-")}
            if evaluated_step != entry["step"]
            else {}
        )
        steps.setdefault(int(entry["step"]), {}).update(
            {name: value for name, value in entry.items() if name not in found}
        )
        if found:
            steps.setdefault(evaluated_step, {"step": evaluated_step}).update(found)
    return [steps[step] for step in sorted(steps)]


def series(history: History, name: str) -> Series:
    """Return steps and values of one metric, without values that are not finite."""
    points = [(int(entry["step"]), float(entry[name])) for entry in history if math.isfinite(entry.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Return the mean over `width` (made odd) values around each one.

    At the start, where curves are steep, the window shrinks on both sides. At the end it keeps all values before, so
    that the noise of one step is not mistaken for the result.
    """
    half = width // 2
    windows = (values[max(0, i - half) : i + min(i, half) + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _training_curve(history: History) -> tuple[str, Series] | None:
    for name, label in (("critic/score/mean", "reward"), ("train/loss", "loss")):
        if (points := series(history, name))[0]:
            return label, points
    return None


def _validation_curves(history: History) -> dict[str, Series]:
    """Return label -> core validation metric; labels name the data source if there are several."""
    names = dict.fromkeys(name for entry in history for name in entry if name.startswith("val-core/"))
    sources = {split_validation_name(name)[0] for name in names}
    curves = {}
    for name in names:
        source, variable, metric = split_validation_name(name)
        curves[" ".join([*([source] if len(sources) > 1 else []), variable, metric])] = series(history, name)
    curves["loss"] = series(history, VALIDATION_LOSS)
    return {f"validation {label}": points for label, points in curves.items() if points[0]}


def stage_lines(history: History) -> list[str]:
    """Return a table of the stages of a step: seconds, share of the step, and MFU (`trainer/utilization.py`).

    Medians over the steps, without the first one, which warms up. Stages under a hundredth of the step are left out.
    """
    step = _median(history, "perf/time_per_step")
    names = dict.fromkeys(name for entry in history for name in entry if name.startswith("timing_s/"))
    seconds = {name.removeprefix("timing_s/"): _median(history, name) for name in names if name != "timing_s/step"}
    rows = [
        f"  {stage:<20}{taken:>10.3f}{taken / step:>8.0%}{_median(history, f'perf/mfu/{MFU_NAMES.get(stage)}'):>9.2%}"
        for stage, taken in sorted(seconds.items(), key=lambda item: -item[1])
        if taken >= MIN_SHARE * step
    ]
    head = f"  {'stage':<20}{'s a step':>10}{'share':>8}{'MFU':>9}"
    return [head, *(row.replace("nan%", "").rstrip() for row in rows)] if rows else []


def _median(history: History, name: str) -> float:
    """Return the median of a metric over the steps after the first one that has it; nan without any."""
    values = series(history, name)[1]
    return statistics.median(values[1:] or values) if values else math.nan


def _change(what: str, points: Series) -> str:
    steps, values = points
    if not values:
        return f"{what}: no finite value"
    if len(values) == 1:
        return f"{what}: {values[0]:.3f} (step {steps[0]})"
    return f"{what}: {values[0]:.3f} -> {values[-1]:.3f} (step {steps[0]} -> {steps[-1]})"


def _ends(points: Series) -> Series:
    """Return first and last step with the means over the first and last tenth."""
    steps, values = points
    size = max(1, len(values) // 10)
    return (
        ([steps[0], steps[-1]], [sum(values[:size]) / size, sum(values[-size:]) / size]) if len(steps) > 1 else points
    )


# -- drawing

PANEL_INCHES = (6.4, 3.8)
SIDE_INCHES, ABOVE_INCHES, BELOW_INCHES = 0.85, 0.35, 0.95  # around each panel, for labels, title and legend
TITLE_INCHES = 0.3  # of the picture
LEGEND_HEIGHT = -0.2  # its upper edge in heights of the panel: below the label of the axis


def _draw(history: History, panels: Sequence[Panel], path: Path, *, title: str, has_progress: bool) -> None:
    from matplotlib.figure import Figure  # without pyplot, which would look for a window system

    count = len(panels) + has_progress
    columns = 2 if count > 1 else 1
    rows = -(-count // columns)
    width, height = PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows
    figure = Figure(figsize=(width, height))
    wide_last = count % columns != 0  # an odd number of panels: the last one takes the whole row
    # Fixed margins: a layout that is computed from the drawn texts draws everything twice and takes a second.
    inner_width = (width - 2 * SIDE_INCHES * columns) / columns
    inner_height = (height - (ABOVE_INCHES + BELOW_INCHES) * rows - TITLE_INCHES) / rows
    grid = figure.add_gridspec(
        rows,
        columns,
        left=SIDE_INCHES / width,
        right=1 - SIDE_INCHES / width,
        bottom=BELOW_INCHES / height,
        top=1 - (ABOVE_INCHES + TITLE_INCHES) / height,
        wspace=2 * SIDE_INCHES / inner_width,
        hspace=(ABOVE_INCHES + BELOW_INCHES) / inner_height,
    )
    cells = [
        grid[i // columns, :] if wide_last and i == count - 1 else grid[i // columns, i % columns] for i in range(count)
    ]
    if has_progress:
        _draw_progress(figure.add_subplot(cells.pop(0)), history)
    for cell, panel in zip(cells, panels, strict=True):
        _draw_panel(figure.add_subplot(cell), history, panel)
    if title:
        figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=130)


def _draw_progress(axes: Any, history: History) -> None:
    """Draw training reward (or loss) with its moving average, and validations as points."""
    training, validations = _training_curve(history), _validation_curves(history)
    labels = [training[0]] if training else []
    if training:
        label, (steps, values) = training
        _draw_curve(axes, steps, values, label=f"training {label}", colour=COLOURS[0])
    for (label, (steps, values)), colour in zip(
        validations.items(), _cycled(COLOURS[1:], len(validations)), strict=True
    ):
        axes.plot(steps, values, "o-", color=colour, markersize=5, label=label)
    _cut_margin_below_zero(axes, [*([training] if training else []), *validations.items()])
    labels += ["validation"] if validations else []
    _finish(axes, title=" and ".join(labels).capitalize(), unit=labels[0] if len(labels) == 1 else " / ".join(labels))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, LEGEND_HEIGHT), ncols=3, frameon=False)


def _draw_panel(axes: Any, history: History, panel: Panel) -> None:
    left, right = _curves(history, panel.left), _curves(history, panel.right)
    sides = [(axes, left, panel.left_label)] if left else []
    if right:
        sides.append((axes.twinx() if left else axes, right, panel.right_label))
    colours = iter(_cycled(COLOURS, len(left) + len(right)))
    for side, curves, unit in sides:
        which = " (right)" if left and curves is right else ""
        for label, (steps, values) in curves:
            _draw_curve(side, steps, values, label=label + which, colour=next(colours))
        side.set_ylabel(unit)
        _cut_margin_below_zero(side, curves)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    _finish(axes, title=panel.title, unit=axes.get_ylabel())
    handles = [handle for side, _, _ in sides for handle in side.get_legend_handles_labels()[0]]
    # Below the plot: inside, it would cover curves of one of the axes.
    axes.legend(
        handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, LEGEND_HEIGHT), ncols=4, frameon=False
    )


def _curves(history: History, names: Sequence[tuple[str, str]]) -> list[tuple[str, Series]]:
    """Return label and points of the metrics that have a value other than zero."""
    return [(label, points) for name, label in names if any((points := series(history, name))[1])]


def _draw_curve(axes: Any, steps: list[int], values: list[float], *, label: str, colour: str) -> None:
    """Draw a moving average over the faint single steps, or only the steps if they are few."""
    width = round(len(steps) * SMOOTHING)
    if width < 3:
        axes.plot(steps, values, color=colour, label=label, marker="." if len(steps) < 20 else "")
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    axes.plot(steps, moving_average(values, width), color=colour, label=label)


def _cut_margin_below_zero(axes: Any, curves: Sequence[tuple[str, Series]]) -> None:
    """Start the axis at zero if only its margin is below.

    Lengths, shares and seconds are not negative.
    """
    if axes.get_ylim()[0] < 0 <= min((min(values) for _, (_, values) in curves), default=-1):
        axes.set_ylim(bottom=0)


def _finish(axes: Any, *, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("training step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _cycled(colours: Sequence[str], count: int) -> list[str]:
    return [colours[i % len(colours)] for i in range(count)]
