"""What the kernel says that each process of a run uses. Linux only: reads /proc."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridrl.master.service.journal import history
from hybridrl.master.state.events import WorkerJoined
from tests.support.blind.processes import classify, descendants

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KIB = 1024
SUM_OF_OTHERS = ("node", "")  # names of `classify` that are no kind of process


@dataclass(frozen=True)
class Usage:
    """What one process uses at a moment.

    Attributes:
        kind: Name of `classify`: "driver", "worker", "raylet" and others.
        pid: Process id.
        started: Clock ticks from the start of the machine to its start. With `pid`, it identifies a process.
        memory: Bytes of memory that belong to no file: resident or swapped out, shared with a parent or not. What
            files occupy (libraries, /dev/shm) depends on other processes and on the kernel.
        shared: Bytes of /dev/shm that it has mapped.
        files: Open file descriptors.
        threads: Threads.
        cpu_s: Seconds of CPU used so far.
    """

    kind: str
    pid: int
    started: int
    memory: int
    shared: int
    files: int
    threads: int
    cpu_s: float


def read_usages(program: int, root: int) -> list[Usage]:
    """Return what each process of a run uses.

    Args:
        program: Process id of the command.
        root: Process whose descendants belong to the run.
    """
    kinds = classify(program, descendants(root))
    found = [read_usage(kind, pid) for kind, pids in kinds.items() if kind not in SUM_OF_OTHERS for pid in pids]
    return [usage for usage in found if usage is not None]


def read_usage(kind: str, pid: int) -> Usage | None:
    """Return what a process uses, None if it has ended."""
    with suppress(OSError, IndexError, KeyError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Usage(
            kind,
            pid,
            started=int(fields[19]),
            memory=(_kib(status, "RssAnon") + _kib(status, "VmSwap")) * KIB,
            shared=_kib(status, "RssShmem") * KIB,
            files=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(status["Threads"][0]),
            cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        )
    return None


def _kib(status: Mapping[str, list[str]], name: str) -> int:
    return int(status[name][0])


def used_bytes(folder: str) -> int:
    """Return how many bytes of a file system are used."""
    numbers = os.statvfs(folder)
    return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize


def directory_bytes(folder: Path) -> int:
    """Return the size of all files below a directory that is written meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):  # a directory that is gone meanwhile is left out
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total


def worker_roles(run: Path) -> dict[int, str]:
    """Return process id -> role of every worker that a run has had, as its journal says."""
    found = {}
    for journal in (run / "master").glob("*"):
        for entry in history(str(journal)):
            if isinstance(entry.event, WorkerJoined):
                found[entry.event.pid] = entry.event.slot.rpartition("-")[0]
    return found
