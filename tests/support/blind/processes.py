"""The processes of a run, by what they are; and harm to them.

Linux only: reads /proc. Limits and signals of other processes need the same user.
"""

import os
import resource
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.blind.surroundings import reset_connections, starve

WORDS = {  # part of the command line -> what the process is
    "raylet/raylet": "raylet",
    "gcs/gcs_server": "gcs",
    "ray::SnapshotStore": "snapshot store",
    "ray::JobMaster": "master",
    "ray::JobSupervisor": "job supervisor",
    "ray::WorkerHost": "worker",
    "rewards/reward_calls.py": "reward process",
    "child_guard.py": "guard",
    "dashboard/agent.py": "agent",
    "dashboard-agent": "agent",
    "DashboardAgent": "agent",
    "runtime_env/agent": "agent",
    "RuntimeEnvAgent": "agent",
    "autoscaler/_private/monitor.py": "ray",
    "log_monitor.py": "ray",
    "ray::": "ray worker",
}
RAY = ("raylet", "gcs")
RUNNING = "RSDT"  # states of a process that has not ended; T: stopped


@dataclass(frozen=True)
class Process:
    """A process, as it is in /proc."""

    pid: int
    parent: int
    state: str
    command: str

    @property
    def label(self) -> str:
        """Its id and its command, short enough for a report."""
        return f"{self.pid} {self.state} {self.command[:90]}"


def read_process(pid: int) -> Process | None:
    """Return a process, None if it has ended."""
    with suppress(OSError, IndexError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return Process(pid, int(parent), state, command)
    return None


def descendants(root: int) -> dict[int, Process]:
    """Return everything below a process, by process id; not those that have ended."""
    found = [process for name in os.listdir("/proc") if name.isdigit() and (process := read_process(int(name)))]
    by_parent: dict[int, list[Process]] = {}
    for process in found:
        by_parent.setdefault(process.parent, []).append(process)
    below: dict[int, Process] = {}
    parents = [root]
    while parents:
        for process in by_parent.get(parents.pop(), []):
            below[process.pid] = process
            parents.append(process.pid)
    return {pid: process for pid, process in below.items() if process.state in RUNNING}


def classify(program: int, below: Mapping[int, Process]) -> dict[str, list[int]]:
    """Return name of `plan.PROCESSES` -> its processes, sorted.

    Args:
        program: Process id of the command.
        below: All processes of the run.
    """
    names = {process.pid: _name(process) for process in below.values()}
    holders = {below[pid].parent for pid, name in names.items() if name in RAY}
    for process in below.values():
        if process.pid == program:
            names[process.pid] = "program"
        elif process.parent == program and not names[process.pid]:
            names[process.pid] = "cluster holder" if process.pid in holders else "driver"
    raylets = [pid for pid, name in names.items() if name == "raylet"]
    if raylets:
        on_node = {pid for raylet in raylets for pid in (raylet, *_below(raylet, below))}
        names_of_node = {pid: "node" for pid in on_node}
    else:
        names_of_node = {}
    found: dict[str, list[int]] = {}
    for pid, name in sorted(names.items()):
        found.setdefault(name, []).append(pid)
    if names_of_node:
        found["node"] = sorted(names_of_node)
    return found


def _name(process: Process) -> str:
    return next((name for words, name in WORDS.items() if words in process.command), "")


def _below(root: int, below: Mapping[int, Process]) -> set[int]:
    found, parents = set(), {root}
    while parents:
        parents = {process.pid for process in below.values() if process.parent in parents} - found
        found |= parents
    return found


def harm(pid: int, how: str) -> bool:
    """Do it; a process that has ended meanwhile is left alone.

    Returns False if there was nothing to harm.
    """
    with suppress(ProcessLookupError):
        if how == "reset":
            return reset_connections(pid) > 0
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        elif how in ("freeze", "pause"):
            os.kill(pid, signal.SIGSTOP)
        elif how == "oom":
            starve(pid)
        else:
            _forbid_memory(pid)
    return True


def resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _forbid_memory(pid: int) -> None:
    """Let the next allocation of new address space fail."""
    with suppress(OSError):
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
