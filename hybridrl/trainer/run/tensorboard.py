"""`TensorBoardTracker`: event files for TensorBoard, written without a thread.

The writer of the package has a thread that dies of the first full disk and prints its traceback. Here an event is
written by the caller, and what a full disk does not take is written with a later step, as in `metrics.jsonl`.
"""

import contextlib
import itertools
import json
import os
import socket
import time
from importlib import import_module
from typing import Any

from hybridrl.trainer.run.tracking import TENSORBOARD_DIRECTORY, Metrics, PatientFile, RunInfo

FILE_NUMBERS = itertools.count()  # of this process: two files of one second have different names
FILE_VERSION = "brain.Event:2"


class TensorBoardTracker:
    """One event per step under `tensorboard/`, with all of its metrics, and the settings as a text."""

    def __init__(self, run: RunInfo) -> None:
        self._event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2")
        directory = run.directory / TENSORBOARD_DIRECTORY
        directory.mkdir(exist_ok=True)
        owner = f"{socket.gethostname()}.{os.getpid()}.{next(FILE_NUMBERS)}"
        self._file = PatientFile(directory / f"events.out.tfevents.{int(time.time()):010d}.{owner}")
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter(self._file)
        first = run.start_step + 1 if run.start_step else 0  # hides what dead processes logged from this step on
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        shown = f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```"
        settings = import_module("torch.utils.tensorboard.summary").text("config", shown)
        for event in (
            {"file_version": FILE_VERSION},
            {"step": first, "session_log": start},
            {"step": run.start_step, "summary": settings},
        ):
            with contextlib.suppress(OSError):  # the file keeps the event, and `log` reports the full disk
                self._write(**event)

    def log(self, metrics: Metrics, step: int) -> None:
        """Write the event of a step.

        Raises OSError if the disk is full; the event is then written later.
        """
        values = [self._summary.Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary.Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event.Event(wall_time=time.time(), **content).SerializeToString())
