"""Send a run's metrics to the logging back ends of `trainer.logger`.

One class per back end.

A back end's package is imported only if a run uses it. Used by the trainers, in the driver. Computes no metrics.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

from hybridrl.config.plugs import TRACKERS
from hybridrl.errors import ConfigError
from hybridrl.system.atomic_write import atomic_write
from hybridrl.trainer.run.console import ConsoleProgress

logger = logging.getLogger(__name__)
Metrics = Mapping[str, float]
METRICS_FILE, TENSORBOARD_DIRECTORY = "metrics.jsonl", "tensorboard"
EVALUATED = "val/version"  # a remote evaluation belongs to the step of its weights, not to the one that logged it
MAX_STEP = 10**15
SETTINGS_FILE = "config.json"


@dataclass(frozen=True)
class RunInfo:
    """The run, as its back ends see it."""

    project_name: str
    experiment_name: str
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    start_step: int = 0  # last valid step; later ones were logged by a process that died, and will be logged again
    total_steps: int | None = None


class Tracker(Protocol):
    """A back end, one object per run, in the driver.

    `trainer.logger` names its class or has its import path.

    The driver imports the class and constructs it once when the run starts. An OSError of a method, such as a full disk
    or a lost connection, is logged once and the run goes on; any other exception ends the run.
    """

    def __init__(self, run: RunInfo) -> None:
        """Start or continue the run's record.

        `run.start_step` is the last step whose record is valid.
        """

    def log(self, metrics: Metrics, step: int) -> None:
        """Record the metrics of one step. Steps ascend. Values may be infinite or nan."""

    def close(self) -> None:
        """Write what is buffered and release resources.

        Called once, also after an error of the run.
        """


class PatientFile:
    """A file to append to.

    What a full disk does not take is kept, and written by a later `write`.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open until `close`
        self._unwritten = b""

    def write(self, data: bytes) -> None:
        """Write what was left before and `data`. Raises OSError if some of it is left."""
        self._unwritten += data
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Write what is left if possible; `write` has raised the error before."""
        with contextlib.closing(self._file), contextlib.suppress(OSError):
            self.write(b"")


class Tracking:
    """The loggers of a run.

    Args:
        project_name: Name of the project.
        experiment_name: Name of the run in it.
        loggers: Names from `TRACKERS`, or import paths of classes with the methods of `Tracker`.
        directory: Where the local ones write.
        config: Nested settings, stored with the run.
        start_step: 0 starts a new record and replaces the one in `directory`; k > 0 continues after step k.
        total_steps: Steps of the whole run, None if unknown.

    Raises:
        ConfigError: A logger is unknown or its package is missing; nothing has been written then.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        loggers: Sequence[str],
        directory: str | Path,
        config: Mapping[str, Any],
        *,
        start_step: int = 0,
        total_steps: int | None = None,
    ) -> None:
        classes = {name: _tracker_class(name) for name in loggers}
        run = RunInfo(project_name, experiment_name, Path(directory).absolute(), config, start_step, total_steps)
        run.directory.mkdir(parents=True, exist_ok=True)
        self._trackers: list[Tracker] = []
        self._failed: set[Tracker] = set()  # the log has said so
        with contextlib.ExitStack() as started:  # closes the earlier ones if a later one cannot start
            for tracker in classes.values():
                self._trackers.append(tracker(run))
                started.callback(self._trackers[-1].close)
            self._open = started.pop_all()

    def log(self, metrics: Metrics, step: int) -> None:
        """Log the metrics of `step`, infinite and nan values unchanged.

        Call once per step, in ascending order.
        """
        for tracker in self._trackers:
            try:
                tracker.log(metrics, step)
            except OSError as error:
                self._report_failure(tracker, error, step)

    def _report_failure(self, tracker: Tracker, error: OSError, step: int) -> None:
        if tracker not in self._failed:
            self._failed.add(tracker)
            logger.warning(
                "step %d: %s could not write its metrics: %s; training continues", step, type(tracker).__name__, error
            )

    def close(self) -> None:
        """Flush and close every logger, even if one of them fails.

        A second call does nothing.
        """
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ConsoleTracker(ConsoleProgress):
    """One line per step on standard output; a bar on a terminal."""

    def __init__(self, run: RunInfo) -> None:
        test_freq = int(run.config.get("trainer", {}).get("test_freq") or 0)
        super().__init__(run.total_steps, start_step=run.start_step, test_freq=test_freq)


class JsonlTracker:
    """`metrics.jsonl`: one object per step, `{"step": 3, "critic/score/mean": 0.5, ...}`, flushed by every `log`.

    Values that are not finite are written as NaN and Infinity, which Python and pandas read. What a full disk does not
    take is written with a later step. Beside it are the settings of the run, in `config.json`, for `hybridrl view`.
    There `trainer.total_training_steps` is a number, also if the run counts epochs.
    """

    def __init__(self, run: RunInfo) -> None:
        path = run.directory / METRICS_FILE
        if run.start_step == 0 and path.exists() and path.stat().st_size:
            logger.warning("%s of an earlier run without a checkpoint is replaced", path)
        _keep_steps(path, last=run.start_step if run.start_step > 0 else -1)
        self._file = PatientFile(path)
        with contextlib.suppress(OSError), atomic_write(run.directory / SETTINGS_FILE) as file:
            json.dump(_with_total_steps(run), file, default=str)

    def log(self, metrics: Metrics, step: int) -> None:
        line = json.dumps({"step": step} | {name: float(value) for name, value in metrics.items()}) + "\n"
        self._file.write(line.encode())

    def close(self) -> None:
        self._file.close()


def _with_total_steps(run: RunInfo) -> Mapping[str, Any]:
    if run.total_steps is None:
        return run.config
    return {**run.config, "trainer": {**run.config.get("trainer", {}), "total_training_steps": run.total_steps}}


PACKAGES = ("tensorboard", "wandb", "mlflow")  # of the loggers with these names, and our extras


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the lines of a `metrics.jsonl` that are whole."""
    return list(iterate_metrics(path))


def iterate_metrics(path: str | Path) -> Iterator[dict[str, float]]:
    """Yield the lines of a `metrics.jsonl` that are whole, one in memory at a time."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                if (entry := whole_entry(json.loads(line))) is not None:
                    yield entry


def whole_entry(found: Any) -> dict[str, float] | None:
    """Return the numbers in a line of `metrics.jsonl` that a float holds; None for a line without a step."""
    if not isinstance(found, dict):
        return None
    entry = {name: value for name, value in found.items() if isinstance(value, float) or _fits_float(value)}
    for name in ("step", EVALUATED):
        if not abs(entry.get(name, 0)) <= MAX_STEP:
            del entry[name]
    return entry if "step" in entry else None


def _fits_float(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _tracker_class(name: str) -> Callable[[RunInfo], Tracker]:
    """Return the class of a logger.

    Raises ConfigError if it is unknown or its package is missing.
    """
    found = TRACKERS.lookup(name)
    try:
        if name in PACKAGES:
            import_module(name)
    except ImportError as error:
        hint = f"in the checkout: pip install -e '.[{name}]', or take {name} out of trainer.logger"
        raise ConfigError(
            f"trainer.logger has {name!r}, but the package {name} cannot be imported ({error}): {hint}"
        ) from error
    return found


def _keep_steps(path: Path, *, last: int) -> None:
    """Drop half-written lines and steps after `last`; the file is replaced by one rename."""
    if not path.exists():
        return
    with atomic_write(path) as file:
        file.writelines(json.dumps(entry) + "\n" for entry in iterate_metrics(path) if entry["step"] <= last)
