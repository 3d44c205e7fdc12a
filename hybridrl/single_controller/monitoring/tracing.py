"""Record what this process executes and waits for, as spans in a file.

Recording is off until `start_recording`. A driver calls it, and a worker process at its start if its environment names
a directory. One system call writes one line of JSON when a span ends, so a killed process loses only its open spans:

    {"kind": "call", "name": "generate_sequences", "begin": ns, "end": ns, "thread": "MainThread", "role": "rollout",
    "rank": 1}
    {"kind": "wait", "name": "rollout.generate_sequences", "begin": ns, "end": ns, "thread": "MainThread"}

Times are nanoseconds since 1970. They are monotonic within a process and comparable to microseconds between processes
of one machine. Between machines they are as accurate as the machines' clocks. `framework/graph/timeline.py` reads them.
"""

import json
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hybridrl.single_controller.monitoring.process import PROCESS

DIRECTORY_VARIABLE = "HYBRIDRL_TRACE_DIRECTORY"  # environment variable of a worker: its directory
TRACE = "trace"  # directory of the spans in a run's directory: TRACE/{job}/{process}.jsonl
DRIVER = "driver"  # name of the driver's file
SUFFIX = ".jsonl"

# (role, rank, thread) of the call in progress. A coroutine inherits it from the thread that waits for it.
_call: ContextVar[tuple[str, int, str] | None] = ContextVar("call", default=None)


class TraceFile:
    """The spans of one process, in `directory`/`process`.jsonl."""

    def __init__(self, directory: str, process: str) -> None:
        path = os.path.join(directory, process + SUFFIX)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # Offset from the monotonic clock to 1970: a correction of the system clock must not put a span's end before its
        # begin.
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def write(self, kind: str, name: str, begin: int, end: int, **attributes: Any) -> None:
        """Write a span; begin and end are values of `time.perf_counter_ns`."""
        span = {
            "kind": kind,
            "name": name,
            "begin": self._epoch + begin,
            "end": self._epoch + end,
            "thread": _thread(),
            **attributes,
        }
        os.write(self._file, (json.dumps(span) + "\n").encode())  # one write per line: threads do not interleave

    def close(self) -> None:
        """End the recording; a second call has no effect."""
        if PROCESS.trace is self:
            PROCESS.trace = None
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)


def start_recording(directory: str, process: str) -> TraceFile:
    """Record this process's spans in `directory`/`process`.jsonl until the returned file is closed."""
    stop_recording()
    os.makedirs(directory, exist_ok=True)
    PROCESS.trace = trace = TraceFile(directory, process)
    return trace


def stop_recording() -> None:
    """Stop recording, whoever started it; a second call has no effect."""
    if PROCESS.trace is not None:
        PROCESS.trace.close()


def is_recording() -> bool:
    """Return whether this process records spans."""
    return PROCESS.trace is not None


@contextmanager
def span(kind: str, name: str, **attributes: Any) -> Generator[None, None, None]:
    """Record the block as a span if recording is on; also if the block raises."""
    if PROCESS.trace is None:
        yield
        return
    begin = time.perf_counter_ns()
    try:
        yield
    finally:
        if (trace := PROCESS.trace) is not None:
            trace.write(kind, name, begin, time.perf_counter_ns(), **attributes)


def record_span(kind: str, name: str, begin: float, end: float, **attributes: Any) -> None:
    """Record a span that has ended, if recording is on; begin and end are values of `time.perf_counter`."""
    if (trace := PROCESS.trace) is not None:
        trace.write(kind, name, int(begin * 1e9), int(end * 1e9), **attributes)


@contextmanager
def call_span(role: str, rank: int, method: str) -> Generator[None, None, None]:
    """Record the block as a worker's call; its waits are recorded with the same role and rank."""
    if PROCESS.trace is None:
        yield
        return
    token = _call.set((role, rank, threading.current_thread().name))
    try:
        with span("call", method, role=role, rank=rank):
            yield
    finally:
        _call.reset(token)


@contextmanager
def wait_span(role: str, method: str) -> Generator[None, None, None]:
    """Record the block as waiting for outputs of `role`'s `method`.

    In the driver, or in a worker's call.
    """
    if PROCESS.trace is None:
        yield
        return
    call = _call.get()
    with span("wait", f"{role}.{method}", **({} if call is None else {"role": call[0], "rank": call[1]})):
        yield


def _thread() -> str:
    call = _call.get()
    return threading.current_thread().name if call is None else call[2]
