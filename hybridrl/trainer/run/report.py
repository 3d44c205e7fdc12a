"""The closing lines of a run: where its outputs are, first and last values, the seconds of its stages.

`main_ppo` and the supervised programs print them at the end, in the driver. Reads only logged metrics and examples.
Curves are drawn by `hybridrl view` and TensorBoard.
"""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.errors import CheckpointError
from hybridrl.trainer.checkpoint import ledger_audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from hybridrl.trainer.run.console import VALIDATION_LOSS, split_validation_name
from hybridrl.trainer.run.metrics import MFU_NAMES
from hybridrl.trainer.run.samples import format_answer, format_prompt, read_examples
from hybridrl.trainer.run.tracking import METRICS_FILE, TENSORBOARD_DIRECTORY, read_metrics

History = Sequence[Mapping[str, float]]
Series = tuple[list[int], list[float]]  # steps, values
MIN_SHARE = 0.01  # of a step's time, for a stage to be listed


def report_run(
    directory: str | Path,
    *,
    checkpoint: str | None,
    written: Mapping[str, str | None] | None = None,
    trained: bool = True,
) -> str:
    """Return the closing lines of the run that wrote to `directory`.

    Args:
        directory: The run's directory.
        checkpoint: Path of the run's newest checkpoint.
        written: Other outputs of the run, name -> path; None if the run did not write it.
        trained: Whether the run trained. A validation alone has no checkpoint; its lines are shown before.
    """
    directory = Path(directory).absolute()
    metrics = directory / METRICS_FILE
    history = merge_steps(read_metrics(metrics)) if metrics.exists() else []
    commits = checkpoint or "none: trainer.save_freq=N commits every N steps and at the end"
    outputs = {
        "last checkpoint": commits if trained else None,
        "metrics": metrics if history else "not stored: add jsonl to trainer.logger for metrics and curves",
        "curves": f"hybridrl view {shlex.quote(str(directory))}" if history else None,
        "TensorBoard": directory / TENSORBOARD_DIRECTORY if (directory / TENSORBOARD_DIRECTORY).exists() else None,
    } | dict(written or {})
    lines = [f"{what}: {where}" for what, where in outputs.items() if where]
    lines += _prompt_line(directory)
    results = [*value_lines(history), *stage_lines(history), *_examples(directory, history)] if trained else []
    return "\n".join([*lines, *results]) + "\n"


def _prompt_line(directory: Path) -> list[str]:
    """Return what became of the prompts that the run has drawn, and how to read on if one is lost or repeated."""
    try:
        audit = ledger_audit.audit(read_ledger(str(directory / FILE)))
    except CheckpointError as error:
        return [f"prompts: {error}"]
    if not audit.steps:
        return []
    hint = f"; {ledger_audit.COMMAND} {shlex.quote(str(directory))} names them" if audit.problems() else ""
    return [f"prompts: {audit.prompt_count()}{hint}"]


def _examples(directory: Path, history: History) -> list[str]:
    """Return, per data source, the first and last answer to the same problem."""
    steps = {step for name in _validation_names(history) for step in series(history, name)[0]}
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for example in read_examples(directory):
        if example["step"] in steps:
            by_source.setdefault(example["data_source"], []).append(example)
    lines = []
    for first, *others in by_source.values():
        lines += [format_prompt(first), *(f"  {format_answer(example)}" for example in [first, *others[-1:]])]
    return lines


def value_lines(history: History) -> list[str]:
    """Return first and last values of the training reward or loss, and of every core validation metric.

    Args:
        history: Of `merge_steps`.
    """
    lines: list[str] = []
    for name, label in (("critic/score/mean", "reward"), ("train/loss", "loss")):
        if (points := series(history, name))[0] and not lines:
            lines.append(_change(f"training {label}, mean of the first and last tenth", _ends(points)))
    for name in _validation_names(history):
        label = f"validation {' '.join(split_validation_name(name))}" if "val-core/" in name else name
        lines.append(_change(label, series(history, name)))
    return lines


def _validation_names(history: History) -> list[str]:
    names = dict.fromkeys(name for entry in history for name in entry)
    return [name for name in names if name.startswith("val-core/") or name == VALIDATION_LOSS]


def merge_steps(history: History) -> list[dict[str, float]]:
    """Return one entry per step in ascending order; if a step was logged twice, later values count.

    Results of a remote evaluation are assigned to the step of its weights (`val/version`), not to the step that logged
    them.
    """
    steps: dict[int, dict[str, float]] = {}
    for entry in history:
        logged, evaluated = int(entry["step"]), int(entry.get("val/version", entry["step"]))
        for name, value in entry.items():
            step = evaluated if name.startswith("val-") else logged
            steps.setdefault(step, {"step": step})[name] = value
    return [steps[step] for step in sorted(steps)]


def series(history: History, name: str) -> Series:
    """Return steps and values of one metric, without values that are not finite."""
    points = [(int(entry["step"]), float(entry[name])) for entry in history if math.isfinite(entry.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


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
