"""`JobContext`: a job's state with the journal behind it. What was applied is in the journal; a new master reads it and
goes on.

A journal is a directory on any fsspec path. `events-000000012.jsonl` holds the events from number 12 on, one in each
line behind the CRC-32 of its bytes, in hex. `snapshot-000000400.json` is the state that the events before number 400
lead to. On a local disk an event is appended, and synced if something is decided by it; on storage that cannot append,
every event is an object of its own.

A last line without an end of line was being written when its writer died: it never counted, and the next writer begins
a new file. Any other damage is a `JournalError`. A disk that is full stops no job: lines wait in memory until they can
be written.
"""

import json
import logging
import os
import time
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from hybridrl.errors import JournalError
from hybridrl.master.state.events import Begun, Committed, Effect, Ended, Event, StopAsked, decode, encode
from hybridrl.master.state.reducer import JobState, from_json, reduce, to_json

logger = logging.getLogger(__name__)
EVENTS, SNAPSHOT = "events-", "snapshot-"
SNAPSHOT_EVERY = 500
# After these a local file is synced. The others are said again by whoever said them, when a machine that crashed is
# back.
SYNCED = (Begun, Committed, StopAsked, Ended)


class Entry(NamedTuple):
    """number: of the event, from 0 on. at: when it was written, in seconds since 1970."""

    number: int
    at: float
    event: Event


class JobContext:
    """The state of one job, durable. `apply` is the only way it changes; one process at a time may do that.

    path: the journal's directory, made when it is not there. What a directory holds already is replayed. Raises
    JournalError where that is damaged.
    """

    def __init__(self, path: str, *, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self.path, self._every = path, snapshot_every
        self._fs, self._root = fsspec.core.url_to_fs(path)
        self._fs.makedirs(self._root, exist_ok=True)
        self.state, self.num_events = replay(path)
        self._file: Any = None
        self._waiting: list[
            tuple[int, bytes, bool]
        ] = []  # lines that could not be written yet: number, line, whether to sync
        self._snapshot_at = self.num_events

    @property
    def is_durable(self) -> bool:
        """Whether everything applied is in the journal."""
        return not self._waiting

    def apply(self, event: Event) -> tuple[Effect, ...]:
        """Write the event, move the state, and return what is to be done.

        An event that changes nothing leaves no trace.
        """
        following, effects = reduce(self.state, event)
        if following == self.state and not effects:
            return ()
        line = _line({"n": self.num_events, "at": time.time(), **encode(event)})
        self._waiting.append((self.num_events, line, isinstance(event, SYNCED) or bool(effects)))
        self.state, self.num_events = following, self.num_events + 1
        self.flush()
        return effects

    def flush(self) -> None:
        """Write what waits. A failure is logged once; then it waits for the next time."""
        try:
            while self._waiting:
                self._write(*self._waiting[0])
                self._waiting.pop(0)
            if self.num_events - self._snapshot_at >= self._every:
                self._write_snapshot()
        except OSError as error:
            self._close()  # what was written of the line stays the torn end of its file
            if len(self._waiting) == 1:
                logger.error(
                    "the journal %s cannot be written (%s); the job goes on, and the master tries again",
                    self.path,
                    error,
                )

    def _write(self, number: int, line: bytes, sync: bool) -> None:
        if not isinstance(self._fs, LocalFileSystem):
            self._fs.pipe_file(_file(self._root, EVENTS, number), line)
            return
        if self._file is None:
            self._file = open(_file(self._root, EVENTS, number), "wb", buffering=0)  # noqa: SIM115 - open for the journal's life
        if self._file.write(line) != len(line):
            raise OSError(f"line {number} was cut short")
        if sync:
            os.fsync(self._file.fileno())

    def _write_snapshot(self) -> None:
        path, line = _file(self._root, SNAPSHOT, self.num_events), _line(to_json(self.state))
        if isinstance(self._fs, LocalFileSystem):
            aside = f"{path}.part"
            with open(aside, "wb") as f:
                f.write(line)
                f.flush()
                os.fsync(f.fileno())
            os.rename(aside, path)
        else:
            self._fs.pipe_file(path, line)
        self._snapshot_at = self.num_events
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Write what can be written and close the files."""
        self.flush()
        self._close()


def replay(path: str) -> tuple[JobState, int]:
    """Return the state that a journal leads to, and the number of its events.

    An empty directory is a job that did not begin.
    """
    fs, root = fsspec.core.url_to_fs(path)
    snapshots = _numbered(fs, root, SNAPSHOT)
    state, start = JobState(), 0
    if snapshots:
        start = max(snapshots)
        state = from_json(_read_snapshot(fs, snapshots[start]))
    number = start
    for entry in _entries(fs, root, first=start):
        state, number = reduce(state, entry.event)[0], entry.number + 1
    return state, number


def history(path: str) -> list[Entry]:
    """Return every event of a journal, oldest first."""
    return list(_entries(*fsspec.core.url_to_fs(path), first=0))


def _entries(fs, root: str, *, first: int) -> Iterator[Entry]:
    """The events from number `first` on. Files that begin later than the one before ended are damage."""
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
                f"{path} begins with event {number}, but the file before it ends with event {expected - 1}"
            )
        for line_number, data in _lines(fs, path):
            if data.pop("n", None) != expected:
                raise JournalError(f"{path}, line {line_number}: event {expected} belongs here")
            at, expected = data.pop("at"), expected + 1
            if expected > first:
                yield Entry(expected - 1, at, decode(data))


def _lines(fs, path: str) -> Iterator[tuple[int, dict]]:
    lines = fs.cat_file(path).split(b"\n")
    for number, line in enumerate(
        lines[:-1], start=1
    ):  # behind the last end of line is nothing, or what was not finished
        yield number, _data(line, f"{path}, line {number}")


def _read_snapshot(fs, path: str) -> dict:
    return _data(fs.cat_file(path).rstrip(b"\n"), f"{path}, line 1")


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


def _numbered(fs, root: str, kind: str) -> dict[int, str]:
    """The files of one kind by the number in their names."""
    names = fs.ls(root, detail=False) if fs.exists(root) else []
    found = [name for name in names if name.rsplit("/", 1)[-1].startswith(kind) and not name.endswith(".part")]
    return {int(name.rsplit("/", 1)[-1][len(kind) :].split(".")[0]): name for name in found}
