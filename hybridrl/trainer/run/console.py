"""What a person sees while it runs: a line for a step now and then, and on a terminal a bar below.

Keeps no record: `tracking` does.
"""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

MAX_COLUMNS = 160
ETA_WINDOW = (
    20  # steps whose pace gives the ETA: few enough to follow growing responses, enough to even out validations
)

FIRST_STEPS = 10  # of a process have a line each: is it learning, is it fast?
# afterwards, and in the last step, and with a validation: hundreds of fast steps would push everything else away
LINE_EVERY_S = 5.0

# What a step's line shows, in order, where it was measured: label, metric, format.
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
UNSEEN_AT_ZERO = ("actor/ppo_kl",)  # with one update per batch it is exactly zero, always
BAR_LABELS = ("reward", "loss", "len")
BAR_FORMAT = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix}"
VALIDATION_LOSS = "val/loss"


class Progress:
    """Shows steps on `stream` (standard output): plain lines, and if it is a terminal a bar with the time left.

    The first steps, the last one, and those with a validation have a line; of the others one every `LINE_EVERY_S`
    seconds.

    total_steps: of the whole run, None if unknown. start_step: steps that an earlier process has done.
    """

    def __init__(self, total_steps: int | None = None, *, start_step: int = 0, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self._stream = sys.stdout if stream is None else stream
        self._every_step_until = start_step + FIRST_STEPS
        self._marks = deque([(start_step, time.monotonic())], maxlen=ETA_WINDOW + 1)  # (step, seconds on the clock)
        self._last_line_at = self._marks[0][1]
        self._open = contextlib.ExitStack()
        self._bar: tqdm | None = None
        if self._stream.isatty():
            bar = tqdm(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
                bar_format=BAR_FORMAT,
            )
            self._bar = self._open.enter_context(bar)
            self._open.enter_context(logging_redirect_tqdm())  # or log lines would cut through the bar

    def update(self, metrics: Mapping[str, float], step: int) -> None:
        """Show what was measured in `step`: a line for the training step if one is due, a line for each validated data
        source.
        """
        if step > self._marks[-1][0]:
            self._marks.append((step, time.monotonic()))
        fields, validated = step_fields(metrics), validation_lines(metrics, step, total_steps=self.total_steps)
        if fields and (validated or self._line_is_due(step)):
            self._last_line_at = self._marks[-1][1]
            self._write(step_line(metrics, step, total_steps=self.total_steps, eta_s=self.eta_s()))
        for line in validated:
            self._write(line)
        if self._bar is not None:
            self._move(
                self._bar,
                step,
                [f"{label} {text}" for label, text in fields.items() if label in BAR_LABELS] + pace(metrics)[:1],
            )

    def _line_is_due(self, step: int) -> bool:
        at_an_end = step <= self._every_step_until or step == self.total_steps
        return at_an_end or self._marks[-1][1] - self._last_line_at >= LINE_EVERY_S

    def eta_s(self) -> float | None:
        """Return the seconds left at the pace of the latest steps, or None if that cannot be known yet."""
        (first_step, first_time), (last_step, last_time) = self._marks[0], self._marks[-1]
        if self.total_steps is None or last_step == first_step:
            return None
        return max(0, self.total_steps - last_step) * (last_time - first_time) / (last_step - first_step)

    def close(self) -> None:
        """Take the bar away; lines stay."""
        self._open.close()

    def _move(self, bar: tqdm, step: int, shown: list[str]) -> None:
        eta_s = self.eta_s()
        if shown and eta_s is not None:
            shown.append(f"eta {duration(eta_s)}")
        if shown:
            bar.set_postfix_str("  ".join(shown), refresh=False)
        bar.n = step
        bar.refresh()

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


def step_line(
    metrics: Mapping[str, float], step: int, *, total_steps: int | None = None, eta_s: float | None = None
) -> str:
    """Return one line about a training step, for instance
    `step 12/150  reward 0.512  len 14.2  kl 0.0012  entropy 0.31  grad 0.42  1234 tok/s  1.90 s/step  eta 4m12s`."""
    parts = [
        _step_of(step, total_steps),
        *(f"{label} {text}" for label, text in step_fields(metrics).items()),
        *pace(metrics),
    ]
    if eta_s is not None:
        parts.append(f"eta {duration(eta_s)}")
    return "  ".join(parts)[:MAX_COLUMNS]


def step_fields(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the quantities of a training step by label, as text; empty where `metrics` are of a validation only."""
    fields: dict[str, str] = {}
    for label, name, spec in STEP_FIELDS:
        if name in metrics and (metrics[name] or name not in UNSEEN_AT_ZERO):
            fields.setdefault(label, format(float(metrics[name]), spec))
    return fields


def validation_lines(metrics: Mapping[str, float], step: int, *, total_steps: int | None = None) -> list[str]:
    """Return a line for each data source that was validated, with its core metrics, and one for a validation loss."""
    parts: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if name.startswith("val-core/"):
            source, variable, metric = split_validation_name(name)
            parts.setdefault(source, []).append(f"{variable} {metric} {float(value):.3f}")
    if VALIDATION_LOSS in metrics:
        parts[""] = [f"loss {float(metrics[VALIDATION_LOSS]):.4f}"]
    head = f"{_step_of(step, total_steps)}  validation"
    return ["  ".join(filter(None, [head, source, *shown]))[:MAX_COLUMNS] for source, shown in parts.items()]


def split_validation_name(name: str) -> tuple[str, str, str]:
    """Return data source, variable and metric of `val-core/{data_source}/{variable}/{metric}`; source and metric may
    have slashes.
    """
    path, _, tail = name.removeprefix("val-core/").partition("@")
    source, variable, metric = path.rsplit("/", 2)
    return source, variable, f"{metric}@{tail}"


def pace(metrics: Mapping[str, float]) -> list[str]:
    """Return tokens per second over all devices, and seconds per step, where they were measured; the time of validation
    is left out.
    """
    seconds, tokens = (
        metrics.get("perf/time_per_step", metrics.get("timing_s/step")),
        metrics.get("perf/total_num_tokens"),
    )
    if seconds:
        seconds -= metrics.get("timing_s/testing", 0.0)
    shown = []
    if seconds and tokens:
        shown.append(f"{tokens / seconds:.0f} tok/s")
    if seconds:
        shown.append(f"{seconds:.2f} s/step")
    return shown


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: `48s`, `4m12s`, `2h05m`, `3d04h`."""
    whole = round(seconds)
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // smaller:02d}{smaller_name}"
    return f"{whole}s"


def _step_of(step: int, total_steps: int | None) -> str:
    return f"step {step}" if total_steps is None else f"step {step}/{total_steps}"
