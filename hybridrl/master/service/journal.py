"""`JournaledState`: a job's state, written to a journal.

A restarted master replays the journal and continues.

A journal is a directory on any fsspec path:

  - `events-000000012.jsonl` holds the events from number 12 on, one per line. Each line starts with the CRC-32 of the
    rest, in hex.
  - `snapshot-000000400.json` is the state after the events before number 400.

On a local disk an event is appended, and synced if it decides something. On storage that cannot append, every event is
an object of its own.

A last line without a newline is a torn write: it does not count, and the next writer starts a new file. Any other
damage raises `JournalError`. A full disk does not stop the job: lines stay in memory until they can be written.
"""

import json
import logging
import os
import time
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from hybridrl.errors import JournalError
from hybridrl.master.service.private_directory import make_directory
from hybridrl.master.state.events import (
    CheckpointCommitted,
    Effect,
    JobEnded,
    JobEvent,
    JobStarted,
    RecoveryDecided,
    StopRequested,
    decode,
    encode,
)
from hybridrl.master.state.reducer import JobState, from_json, reduce, to_json
from hybridrl.system.atomic_write import atomic_write

logger = logging.getLogger(__name__)
EVENTS, SNAPSHOT = "events-", "snapshot-"
EVENTS_PER_SNAPSHOT = 500
# A local file is synced after these. After a machine crash, their senders send the other events again.
SYNCED_EVENTS = (JobStarted, RecoveryDecided, CheckpointCommitted, StopRequested, JobEnded)


class JournalEntry(NamedTuple):
    """An event with its number (from 0) and the time of its write (seconds since 1970)."""

    number: int
    at: float
    event: JobEvent


class JournaledState:
    """The durable state of one job.

    It changes only by `apply`, in one process at a time.

    Args:
        path: Directory of the journal. Created if missing, replayed otherwise.
        snapshot_every: Events between two snapshots.

    Raises:
        JournalError: If the journal is damaged.
        ConfigError: If its place among the temporary files belongs to another user.
    """

    def __init__(self, path: str, *, snapshot_every: int = EVENTS_PER_SNAPSHOT) -> None:
        self.path, self._snapshot_every = path, snapshot_every
        self._fs, self._root = fsspec.core.url_to_fs(path)
        if isinstance(self._fs, LocalFileSystem):
            make_directory(self._root)
        else:
            self._fs.makedirs(self._root, exist_ok=True)
        self.state, self.num_events = replay(path)
        self._file: Any = None
        self._unwritten: list[tuple[int, bytes, bool]] = []  # number, line, whether to sync
        self._snapshot_at = self.num_events

    @property
    def is_durable(self) -> bool:
        """Whether all applied events are in the journal."""
        return not self._unwritten

    def apply(self, event: JobEvent) -> tuple[Effect, ...]:
        """Write the event, update the state, and return the effects to execute.

        An event that changes nothing is not written.
        """
        following, effects = reduce(self.state, event)
        if following == self.state and not effects:
            return ()
        line = _line({"n": self.num_events, "at": time.time(), **encode(event)})
        self._unwritten.append((self.num_events, line, isinstance(event, SYNCED_EVENTS) or bool(effects)))
        self.state, self.num_events = following, self.num_events + 1
        self.flush()
        return effects

    def flush(self) -> None:
        """Write the unwritten lines. Logs the first failure; the next call tries again."""
        try:
            while self._unwritten:
                self._write(*self._unwritten[0])
                self._unwritten.pop(0)
            if self.num_events - self._snapshot_at >= self._snapshot_every:
                self._write_snapshot()
        except OSError as error:
            self._close()  # a partial line stays as the torn end of its file
            if len(self._unwritten) == 1:
                logger.error(
                    "cannot write the journal %s (%s); the job continues, and the master keeps the events in memory "
                    "and tries again",
                    self.path,
                    error,
                )

    def _write(self, number: int, line: bytes, sync: bool) -> None:
        if not isinstance(self._fs, LocalFileSystem):
            self._fs.pipe_file(_file(self._root, EVENTS, number), line)
            return
        if self._file is None:
            path = _file(self._root, EVENTS, number)
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - stays open until the next snapshot
        if self._file.write(line) != len(line):
            raise OSError(f"event {number} was written only in part")
        if sync:
            os.fsync(self._file.fileno())

    def _write_snapshot(self) -> None:
        path, line = _file(self._root, SNAPSHOT, self.num_events), _line(to_json(self.state))
        if isinstance(self._fs, LocalFileSystem):
            with atomic_write(path, "wb") as f:
                f.write(line)
        else:
            self._fs.pipe_file(path, line)
        self._snapshot_at = self.num_events
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Write the unwritten lines if possible, and close the file."""
        self.flush()
        self._close()


def replay(path: str) -> tuple[JobState, int]:
    """Return the state after all events of a journal, and their number.

    An empty directory is a job that did not start.
    """
    fs, root = fsspec.core.url_to_fs(path)
    snapshots = _numbered(fs, root, SNAPSHOT)
    state, start = JobState(), 0
    if snapshots:
        start = max(snapshots)
        state = from_json(_data(fs.cat_file(snapshots[start]).rstrip(b"\n"), f"{snapshots[start]}, line 1"))
    number = start
    for entry in _entries(fs, root, first=start):
        state, number = reduce(state, entry.event)[0], entry.number + 1
    return state, number


def history(path: str) -> list[JournalEntry]:
    """Return all events of a journal, oldest first."""
    return list(_entries(*fsspec.core.url_to_fs(path), first=0))


def _entries(fs: AbstractFileSystem, root: str, *, first: int) -> Iterator[JournalEntry]:
    """Yield the events from number `first` on. A gap between two files is damage."""
    files = sorted(_numbered(fs, root, EVENTS).items())
    wanted = [i for i, (number, _) in enumerate(files) if number <= first][-1:] or [0]
    expected = files[wanted[0]][0] if files else first
    if expected > first:
        raise JournalError(
            f"{root}: the events {first} to {expected - 1} are missing; the first file there is {files[0][1]}"
        )
    for number, path in files[wanted[0] :]:
        if number != expected:
            raise JournalError(
                f"{path} starts with event {number}, but the file before it ends with event {expected - 1}"
            )
        for line_number, data in _lines(fs, path):
            if data.pop("n", None) != expected:
                raise JournalError(f"{path}, line {line_number}: event {expected} belongs here")
            at, expected = data.pop("at"), expected + 1
            if expected > first:
                yield JournalEntry(expected - 1, at, decode(data))


def _lines(fs: AbstractFileSystem, path: str) -> Iterator[tuple[int, dict]]:
    lines = fs.cat_file(path).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # the last one is empty, or a torn write
        yield number, _data(line, f"{path}, line {number}")


def _data(line: bytes, where: str) -> dict:
    checksum, _, text = line.partition(b" ")
    if checksum != _checksum(text):
        raise JournalError(
            f"{where}: the checksum is wrong, the journal is damaged; restore it, or move it away and start a new run"
        )
    return json.loads(text)


def _line(data: dict) -> bytes:
    text = json.dumps(data).encode()
    return _checksum(text) + b" " + text + b"\n"


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _file(root: str, kind: str, number: int) -> str:
    return f"{root}/{kind}{number:09d}.json{'l' if kind == EVENTS else ''}"


def _numbered(fs: AbstractFileSystem, root: str, kind: str) -> dict[int, str]:
    """Return the files of one kind by the number in their names."""
    names = fs.ls(root, detail=False) if fs.exists(root) else []
    found = [name for name in names if name.rsplit("/", 1)[-1].startswith(kind) and not name.endswith(".part")]
    return {int(name.rsplit("/", 1)[-1][len(kind) :].split(".")[0]): name for name in found}
