"""What this process did when, written to a file of its own as it happens: the calls it served, and what it waited for.

Recording is off until `start_recording`, which a driver calls, and a worker process at its start if its environment
names a directory.
One line of JSON per span, written by one system call when the span ends, so that a killed process loses only what it
was in the middle of:

    {"kind": "call", "name": "generate_sequences", "begin": ns, "end": ns, "thread": "MainThread", "role": "rollout",
    "rank": 1} {"kind": "wait", "name": "rollout.generate_sequences", "begin": ns, "end": ns, "thread": "MainThread"}

Times are nanoseconds since 1970. Within a process they never run backwards; between processes of one machine they are
comparable to microseconds, between machines as well as the machines' clocks agree. What reads them is
`framework/graph/timeline.py`.
"""

import json
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

DIRECTORY_VARIABLE = "HYBRIDRL_TRACE_DIRECTORY"  # in a worker's environment: where it records
SUFFIX = ".jsonl"

# Whose work is being done: (role, rank, thread) of the call. A coroutine inherits it from the thread that waits for it.
_call: ContextVar[tuple[str, int, str] | None] = ContextVar("call", default=None)


class SpanFile:
    """The spans of one process, in `directory`/`process`.jsonl."""

    def __init__(self, directory: str, process: str):
        path = os.path.join(directory, process + SUFFIX)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # The steady clock, told from 1970: a correction of the system's clock must not turn a span's end before its
        # begin.
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def write(self, kind: str, name: str, begin: int, end: int, **facts: Any) -> None:
        """Record a span. begin, end: of `time.perf_counter_ns`."""
        span = {
            "kind": kind,
            "name": name,
            "begin": self._epoch + begin,
            "end": self._epoch + end,
            "thread": _thread(),
            **facts,
        }
        os.write(self._file, (json.dumps(span) + "\n").encode())  # whole lines, whichever threads write

    def close(self) -> None:
        os.close(self._file)


_spans: SpanFile | None = None


def start_recording(directory: str, process: str) -> None:
    """Record this process's spans in `directory`, under the name of the process, instead of where it
    recorded before.
    """
    global _spans
    stop_recording()
    os.makedirs(directory, exist_ok=True)
    _spans = SpanFile(directory, process)


def stop_recording() -> None:
    """Record nothing from here on. Safe to call twice."""
    global _spans
    if _spans is not None:
        spans, _spans = _spans, None
        spans.close()


def is_recording() -> bool:
    return _spans is not None


@contextmanager
def span(kind: str, name: str, **facts: Any) -> Generator[None, None, None]:
    """Record what the block does, if anything is recorded; also if it fails."""
    if _spans is None:
        yield
        return
    begin = time.perf_counter_ns()
    try:
        yield
    finally:
        if _spans is not None:
            _spans.write(kind, name, begin, time.perf_counter_ns(), **facts)


@contextmanager
def call_span(role: str, rank: int, method: str) -> Generator[None, None, None]:
    """The block is a worker's call; what it waits for on the way is told with its address."""
    if _spans is None:
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
    """The block waits for answers of `role`'s `method`, on the driver or in a worker's call."""
    if _spans is None:
        yield
        return
    call = _call.get()
    with span("wait", f"{role}.{method}", **({} if call is None else {"role": call[0], "rank": call[1]})):
        yield


def _thread() -> str:
    call = _call.get()
    return threading.current_thread().name if call is None else call[2]
