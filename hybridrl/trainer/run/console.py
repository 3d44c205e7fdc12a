"""Show a run's progress on standard output: lines, and on a terminal a status line that stays below them.

Used by `ConsoleTracker` in `tracking.py`, in the driver. Stores nothing.
"""

import contextlib
import logging
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from hybridrl.driver.terminal import one_line

MAX_COLUMNS = 160
ETA_WINDOW = 10  # steps, whose median counts: it follows growing responses, and a slow step does not move it

FIRST_STEPS = 10  # of a process: each has a line, to show whether it learns and how fast
LINE_PERIOD_S = 5.0  # between later lines, so that hundreds of fast steps do not fill the terminal

# Fields of a step's line, in order, if measured: label, metric, format.
STEP_FIELDS = (
    ("reward", "critic/score/mean", ".3f"),
    ("loss", "train/loss", ".4f"),
    ("len", "response_length/mean", ".1f"),
    ("kl", "actor/reward_kl_penalty", ".4f"),
    ("kl", "actor/kl_loss", ".4f"),
    ("ppo_kl", "actor/ppo_kl", ".4f"),
    ("entropy", "actor/entropy", ".2f"),
    ("grad", "actor/grad_norm", ".2f"),
    ("grad", "train/grad_norm", ".2f"),
    ("vf_loss", "critic/vf_loss", ".3f"),
    ("lr", "train/lr", ".1e"),
)
HIDDEN_WHEN_ZERO = ("actor/ppo_kl",)  # exactly zero in every run with one update per batch
STATUS_LABELS = ("reward", "loss", "len")
REDRAWS_PER_S = 2
VALIDATION_LOSS = "val/loss"
TESTING, GENERATION = "timing_s/testing", "timing_per_token_ms/gen"
EXTRA = re.compile(r"reward_extra/(.+)/mean")  # what a reward function returned beside its score
MAX_EXTRA = 3


class ConsoleProgress:
    """Writes lines to `stream`, by default standard output.

    A terminal also gets a status line with a bar and the time left. What the process logs or prints meanwhile appears
    above it.

    The first `FIRST_STEPS` steps, the last step and those with a validation have a line; of the others, one every
    `LINE_PERIOD_S` seconds.

    Args:
        total_steps: Steps of the whole run, None if unknown.
        start_step: Steps that an earlier process completed.
        test_freq: Steps between two validations; none if not above 0.
        stream: Where to write.
    """

    def __init__(
        self, total_steps: int | None = None, *, start_step: int = 0, test_freq: int = 0, stream: TextIO | None = None
    ) -> None:
        self.total_steps, self._test_freq = total_steps, test_freq
        self._stream = sys.stdout if stream is None else stream
        self._last_first_step = start_step + FIRST_STEPS
        self._step, self._now = start_step, time.monotonic()  # of the last step that was shown
        self._num_seen = 0  # steps of this process
        self._step_s = deque[float](maxlen=ETA_WINDOW)  # without validation
        self._validation_s = deque[float](maxlen=ETA_WINDOW)
        self._last_line_at = self._now
        self._open = contextlib.ExitStack()
        self._status: Progress | None = None
        if self._stream.isatty():
            self._status = self._open.enter_context(_status_line(self._stream))
            self._status.add_task(
                _step_text(start_step, total_steps), total=total_steps, completed=start_step, shown=""
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the metrics of `step`.

        One line for training if it is due, and one per validated data source.
        """
        self._record(metrics, step)
        fields, validated = step_fields(metrics), validation_lines(metrics, step, total_steps=self.total_steps)
        if fields and (validated or self._line_is_due(step)):
            self._last_line_at = self._now
            self._write(step_line(metrics, step, total_steps=self.total_steps, eta_s=self.eta_s()))
        for line in validated:
            self._write(line)
        if self._status is not None:
            shown = [f"{label} {text}" for label, text in fields.items() if label in STATUS_LABELS]
            self._show_status(self._status, step, shown + throughput_fields(metrics)[:1])

    def _line_is_due(self, step: int) -> bool:
        always = step <= self._last_first_step or step == self.total_steps
        return always or self._now - self._last_line_at >= LINE_PERIOD_S

    def _record(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the seconds of a step and of its validation.

        Before the first step of a process models are loaded, so that only the step's own metric tells its seconds.
        """
        if step <= self._step:
            return
        now, num_steps, testing_s = time.monotonic(), step - self._step, metrics.get(TESTING, 0.0)
        if any(name.startswith("val-core/") or name == VALIDATION_LOSS for name in metrics):
            self._validation_s.append(testing_s)
        step_s = (now - self._now) / num_steps if self._num_seen else metrics.get("perf/time_per_step")
        if self._num_seen == 1:
            self._step_s.clear()  # the first step warms up
        if step_s is not None:
            self._step_s.append(max(0.0, step_s - testing_s))
        self._step, self._now, self._num_seen = step, now, self._num_seen + 1

    def eta_s(self) -> float | None:
        """Return the estimated seconds left, None if unknown.

        They are the median of the last steps for each step, and that of the last validations for each validation.
        """
        if self.total_steps is None or not self._step_s:
            return None
        left = max(0, self.total_steps - self._step) * statistics.median(self._step_s)
        return left + self._validations_left() * (statistics.median(self._validation_s) if self._validation_s else 0.0)

    def _validations_left(self) -> int:
        """Return how many steps will be validated: every `test_freq`-th one and the last one."""
        if self._test_freq <= 0 or self.total_steps is None or self._step >= self.total_steps:
            return 0
        num_due = self.total_steps // self._test_freq - self._step // self._test_freq
        return num_due + (self.total_steps % self._test_freq > 0)

    def close(self) -> None:
        """Remove the status line; other lines stay."""
        self._open.close()

    def _show_status(self, status: Progress, step: int, shown: list[str]) -> None:
        [task], eta_s = status.task_ids, self.eta_s()
        if shown and eta_s is not None:
            shown.append(f"eta {format_duration(eta_s)}")
        if shown:  # a validation alone leaves what the last step has shown
            status.update(task, shown="  ".join(shown))
        status.update(task, completed=step, description=_step_text(step, self.total_steps), refresh=True)

    def _write(self, line: str) -> None:
        line = one_line(line)
        if self._status is not None:
            self._status.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


@contextlib.contextmanager
def _status_line(stream: TextIO) -> Iterator[Progress]:
    """Keep a line at the end of a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[shown]}"))
    status = Progress(
        *columns,
        console=Console(file=stream),
        refresh_per_second=REDRAWS_PER_S,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )
    with status, _logging_to(sys.stderr):
        status.console.show_cursor(True)  # a killed process could not show it again
        yield status


@contextlib.contextmanager
def _logging_to(stream: TextIO) -> Iterator[None]:
    """Let handlers that write to this process's stderr write to what stands for it now."""
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
    before = [(handler, handler.stream) for handler in handlers if handler.stream is sys.__stderr__]
    for handler, _ in before:
        handler.setStream(stream)
    try:
        yield
    finally:
        for handler, old in before:
            handler.setStream(old)


def step_line(
    metrics: Mapping[str, float], step: int, *, total_steps: int | None = None, eta_s: float | None = None
) -> str:
    """Return one line about a training step.

    For instance `step 12/150  reward 0.512  len 14.2  kl 0.0012  entropy 0.31  grad 0.42  1234 tok/s  eta 4m12s`.
    """
    parts = [
        _step_text(step, total_steps),
        *(f"{label} {text}" for label, text in step_fields(metrics).items()),
        *throughput_fields(metrics),
    ]
    if eta_s is not None:
        parts.append(f"eta {format_duration(eta_s)}")
    return "  ".join(parts)[:MAX_COLUMNS]


def step_fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return label -> text of a training step's fields; empty if `metrics` has a validation only."""
    fields: dict[str, str] = {}
    for label, name, spec in STEP_FIELDS:
        if name in metrics and (metrics[name] or name not in HIDDEN_WHEN_ZERO):
            fields.setdefault(label, format(float(metrics[name]), spec))
        if label == "reward" and fields:
            fields |= _reward_fields(metrics)
    return fields


def _reward_fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return what a reward function returned beside its score, and whether all rewards of the batch are equal."""
    found = [(match[1], value) for name, value in metrics.items() if (match := EXTRA.fullmatch(name))]
    fields = {name: f"{value:.3f}" for name, value in found[:MAX_EXTRA]}
    advantages = [metrics.get(f"critic/advantages/{which}") for which in ("max", "min")]
    return fields | ({"all": "equal"} if advantages == [0, 0] else {})


def validation_lines(metrics: Mapping[str, float], step: int, *, total_steps: int | None = None) -> list[str]:
    """Return one line per validated data source with its core metrics, and one for a validation loss.

    An evaluator validates while training goes on: its line names the step whose weights it has used.
    """
    step = int(metrics.get("val/version", step))
    parts: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if name.startswith("val-core/"):
            source, variable, metric = split_validation_name(name)
            parts.setdefault(source, []).append(f"{variable} {metric} {float(value):.3f}")
    if VALIDATION_LOSS in metrics:
        parts[""] = [f"loss {float(metrics[VALIDATION_LOSS]):.4f}"]
    is_only = step == 0 and total_steps is None  # nothing is trained
    head = "validation" if is_only else f"{_step_text(step, total_steps)}  validation"
    return ["  ".join(filter(None, [head, source, *shown]))[:MAX_COLUMNS] for source, shown in parts.items()]


def split_validation_name(name: str) -> tuple[str, str, str]:
    """Split `val-core/{data_source}/{variable}/{metric}`; data source and metric may contain slashes."""
    path, _, tail = name.removeprefix("val-core/").partition("@")
    source, variable, metric = path.rsplit("/", 2)
    return source, variable, f"{metric}@{tail}"


def throughput_fields(metrics: Mapping[str, float]) -> list[str]:
    """Return tokens per second over all devices and seconds per step, if measured, without validation time.

    With generation they are the generated tokens per second of generation, otherwise those of the batch per second of
    the step.
    """
    seconds = metrics.get("perf/time_per_step", metrics.get("timing_s/step"))
    tokens = metrics.get("perf/total_num_tokens")
    if seconds:
        seconds -= metrics.get(TESTING, 0.0)
    shown = []
    if of_token_ms := metrics.get(GENERATION):
        shown.append(f"gen {1000 / of_token_ms:.0f} tok/s")
    elif seconds and tokens:
        shown.append(f"{tokens / seconds:.0f} tok/s")
    if seconds:
        shown.append(f"{seconds:.2f} s/step")
    return shown


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: `48s`, `4m12s`, `2h05m`, `3d04h`."""
    whole = round(seconds)
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // smaller:02d}{smaller_name}"
    return f"{whole}s"


def _step_text(step: int, total_steps: int | None) -> str:
    return f"step {step}" if total_steps is None else f"step {step}/{total_steps}"
