"""Failures of a run and their recoveries, and the state of its roles.

Read from the master's journals below the run's directory (`master/RUN`), which are folded event by event as they grow.
A run without a master, and one of an older version, has the steps that it repeated in `failures.jsonl`.
"""

import json
import zlib
from collections import deque
from dataclasses import asdict
from typing import Any

from hybridrl.errors import JournalError
from hybridrl.master.service.journal import EVENTS
from hybridrl.master.state import events
from hybridrl.master.state.reducer import JobState, reduce
from hybridrl.single_controller.cluster import MASTER
from hybridrl.view.readers.storage import Folder, LineTail, parsed

FAILURES_FILE = "failures.jsonl"  # of `trainer/recovery/step_retry.py`, which loads torch
MAX_EVENTS = 1000  # of one journal; the newest
HIDDEN_FIELDS = ("machine", "node", "name", "stdout", "stderr", "spec", "plan")
COMMON = (events.StepCompleted, events.CheckpointCommitted)  # counted, but not listed


class JournalReader:
    """One journal, folded to the job's state as it grows."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._tails: dict[str, LineTail] = {}
        self._reset()

    def _reset(self) -> None:
        self.state, self.problem = JobState(), ""
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.recoveries: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.restarts: dict[str, int] = {}  # slot -> processes after its first
        self.started_at: float | None = None

    def update(self) -> None:
        """Read the new events. Damage ends the reading; `problem` says so."""
        for name in sorted(name for name in self._folder.names() if name.startswith(EVENTS)):
            tail = self._tails.setdefault(name, LineTail(self._folder, name))
            for _, line in tail.lines():
                if self.problem:
                    return
                self._apply(line, name)

    def _apply(self, line: bytes, name: str) -> None:
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            self.problem = f"{name} is damaged: a checksum is wrong; what follows is not shown"
            return
        try:
            data = json.loads(text)
            at = float(data.pop("at"))
            data.pop("n")
            event = events.decode(data)
            self.state, _ = reduce(self.state, event)
        except JournalError as error:
            self.problem = str(error)
            return
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            self.problem = f"{name} has what no master writes ({type(error).__name__}); what follows is not shown"
            return
        self.started_at = at if self.started_at is None else self.started_at
        if isinstance(event, events.WorkerJoined):
            self.restarts[event.slot] = self.state.workers[event.slot].incarnation - 1
        if isinstance(event, events.RecoveryCompleted):
            self.recoveries.append(asdict(event) | {"lost": list(event.lost)})
        if not isinstance(event, COMMON):
            fields = {} if isinstance(event, events.JobStarted) else asdict(event)
            shown = {
                field: value
                for field, value in fields.items()
                if value not in ("", (), {}) and field not in HIDDEN_FIELDS
            }
            self.events.append({"at": at, "at_step": self.state.step, "event": type(event).__name__, **shown})

    def summary(self) -> dict[str, Any]:
        """Return state, processes, failures and events of the job."""
        state = self.state
        workers = [
            {
                "slot": slot,
                "state": worker.state,
                "pid": worker.pid,
                "restarts": self.restarts.get(slot, 0),
                "exit_reason": worker.exit_reason,
            }
            for slot, worker in sorted(state.workers.items())
        ]
        return {
            "run": state.run or self._folder.name,
            "state": state.state,
            "reason": state.reason,
            "step": state.step,
            "commit_step": state.commit_step if state.commit else None,
            "started_at": self.started_at,
            "workers": workers,
            "events": list(self.events),
            "problem": self.problem,
        }


class FailureReader:
    """All journals of one run, and its repeated steps."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder.below(MASTER)
        self._journals: dict[str, JournalReader] = {}
        self._tail = LineTail(folder, FAILURES_FILE)
        self._recoveries: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    def read(self) -> dict[str, Any]:
        """Return the journals, the newest first, and the repeated steps, the oldest first."""
        for _, line in self._tail.lines(on_replaced=self._recoveries.clear):
            record = parsed(line)
            if record is not None and isinstance(record.get("detected_at", 0.0), int | float):
                self._recoveries.append(record)
        for name in self._folder.names():
            self._journals.setdefault(name, JournalReader(self._folder.below(name))).update()
        found = [journal.summary() for journal in self._journals.values() if journal.started_at is not None]
        found.sort(key=lambda journal: journal["started_at"], reverse=True)
        recoveries = [*self._recoveries, *(one for journal in self._journals.values() for one in journal.recoveries)]
        recoveries.sort(key=lambda one: one.get("detected_at", 0.0))
        return {"journals": found, "recoveries": recoveries}


def recoveries(directory: str) -> list[dict[str, Any]]:
    """Return the recoveries of the run in a directory, the oldest first: the fields of `RecoveryCompleted`."""
    return FailureReader(Folder(directory)).read()["recoveries"]
