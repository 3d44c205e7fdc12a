"""Runs that a page shows, and the readers of each.

Used by `server`, which gives every run a short id. A request names an id, never a path.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

from hybridrl.driver.resume_command import FILE as COMMAND_FILE
from hybridrl.errors import ConfigError
from hybridrl.system.directory_lock import LOCK_FILE
from hybridrl.system.machine import machine_id
from hybridrl.trainer.checkpoint.step_ledger import FILE as LEDGER_FILE
from hybridrl.trainer.run.tracking import METRICS_FILE, SETTINGS_FILE
from hybridrl.view.readers.failures import FailureReader
from hybridrl.view.readers.ledger import LedgerReader
from hybridrl.view.readers.metrics import MetricHistory
from hybridrl.view.readers.samples import SampleStore
from hybridrl.view.readers.settings import RunSettings
from hybridrl.view.readers.storage import Folder, parsed
from hybridrl.view.readers.timeline import TimelineReader

RUN_FILES = {METRICS_FILE, SETTINGS_FILE, COMMAND_FILE, LEDGER_FILE, LOCK_FILE}  # one of them makes a directory a run
CURVES = "curves"  # directory of a training service's store with a run for each model
MAX_RUNS = 100


class Run:
    """One run and its readers.

    Attributes:
        lock: Held by whoever uses a reader: they are not thread-safe.
    """

    def __init__(self, folder: Folder, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id
        self.lock = threading.Lock()
        self.metrics = MetricHistory(folder)
        self.settings = RunSettings(folder)
        self.timeline = TimelineReader(folder)
        self.failures = FailureReader(folder)
        self.ledger = LedgerReader(folder)
        self._samples: dict[str, SampleStore] = {}

    def samples(self, kind: str) -> SampleStore:
        """Return the samples of "rollout" or "validation"."""
        where = self.settings.sample_folder(kind)
        if kind not in self._samples or self._samples[kind].url != where.url:
            self._samples[kind] = SampleStore(where)
        return self._samples[kind]

    def summary(self) -> dict[str, Any]:
        """Return what the list of runs shows; reads what is new."""
        self.metrics.update()
        found = self.folder.stat(METRICS_FILE)
        return {
            "id": self.run_id,
            "path": self.folder.url,
            "step": self.metrics.last_step,
            "total_steps": self.settings.total_steps(),
            "changed": None if found is None else found[1],
            "state": self.state(),
        }

    def state(self) -> str:
        """Return "running", "complete", "interrupted", or "" where a run on another machine may go on."""
        total = self.settings.total_steps()
        if total is not None and (self.metrics.last_step or 0) >= total:
            return "complete"
        try:
            holder = parsed(self.folder.read(LOCK_FILE)) or {}
        except OSError:
            return ""
        if holder.get("machine") != machine_id():
            return ""
        return "running" if os.path.exists(f"/proc/{holder.get('pid')}") else "interrupted"


def open_runs(paths: Sequence[str]) -> dict[str, Run]:
    """Return id -> run of these directories, the newest first; of a directory that is no run, the runs directly in it.

    Raises:
        ConfigError: A path has no run.
    """
    folders: dict[str, Folder] = {}
    for path in paths:
        for folder in _runs_at(path):
            folders.setdefault(folder.url, folder)
    if len(folders) > MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs: at most {MAX_RUNS} fit on one page; name fewer")
    runs: dict[str, Run] = {}
    for folder in sorted(folders.values(), key=_changed, reverse=True):
        run_id = _free_id(folder, runs)
        runs[run_id] = Run(folder, run_id)
    return runs


def _runs_at(path: str) -> list[Folder]:
    try:
        folder = Folder(path)
        names = folder.names()
    except (ValueError, ImportError) as error:  # an unknown protocol, or its package is missing
        raise ConfigError(
            f"{path}: cannot be opened ({error}); name a directory, or a URL that fsspec knows"
        ) from error
    if CURVES in names:
        folder = folder.below(CURVES)
        names = folder.names()
    if RUN_FILES.intersection(names):
        return [folder]
    found = [below for name in sorted(names) if RUN_FILES.intersection((below := folder.below(name)).names())]
    if not found:
        what = "no run has written there" if folder.exists() else "there is no such directory"
        raise ConfigError(
            f"{path}: {what}; name a run's directory (trainer.default_local_dir, or checkpoints/PROJECT/EXPERIMENT) or "
            "one with runs in it, or use --demo. A run writes metrics.jsonl with jsonl in trainer.logger"
        )
    return found


def _changed(folder: Folder) -> float:
    """Return when the run has logged its last step, in seconds; 0 if that is unknown."""
    stats = (folder.stat(name) for name in (METRICS_FILE, SETTINGS_FILE, COMMAND_FILE))
    try:
        return float(next((found[1] for found in stats if found is not None), 0.0))
    except ValueError:  # another storage's text
        return 0.0


def _free_id(folder: Folder, taken: dict[str, Run]) -> str:
    """Return the directory's name, with its parent's name or a number if another run has it."""
    parts = folder.url.rstrip("/").split("/")
    names = [folder.name or "run", "-".join(parts[-2:])] + [f"{folder.name}-{number}" for number in range(2, MAX_RUNS)]
    return next(name for name in names if name not in taken)
