"""Output of a job's process: the end of its stdout and stderr files.

Every process reports the paths of these files to the master (`heartbeat_client.process_identity`). A worker's are in
the log directory of Ray's session, which remains after the end of the process, and of the cluster. They are read here
if they are on this machine, else by a task on the process's node.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from hybridrl.errors import CallTimeout, ConfigError
from hybridrl.master.service.journal import JournalEntry
from hybridrl.master.state.events import WorkerJoined
from hybridrl.single_controller.cluster import get_value
from hybridrl.single_controller.processes.on_node import start_task
from hybridrl.system.machine import machine_id

READ_TIMEOUT_S = 60.0  # for a task to start on the process's node
MAX_BYTES = 4 * 1024**2  # of a file, from its end
MOVED = "old"  # where Ray's log monitor moves files of ended processes when it has too many open
RAY_LINES = (b":job_id:", b":actor_name:", b":task_name:")  # Ray's own marks at the start of a line


def joined_process(entries: Iterable[JournalEntry], process: str) -> WorkerJoined:
    """Return the event of a process in a job's history.

    Args:
        entries: The history.
        process: `actor-0`: the last process of this slot. `actor-0.2`: its second incarnation.

    Raises:
        ConfigError: There is no such process. The message names those that are.
    """
    joined: dict[str, list[WorkerJoined]] = {}
    for event in (entry.event for entry in entries):
        if isinstance(event, WorkerJoined) and event.pid not in [other.pid for other in joined.get(event.slot, ())]:
            joined.setdefault(event.slot, []).append(event)
    slot, _, number = process.rpartition(".") if process not in joined else (process, "", "")
    if slot not in joined or (number and not number.isdecimal()):
        near = get_close_matches(process, joined, n=1)
        known = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(joined)) or 'none'}"
        raise ConfigError(f"--process {process}: the job has no such process; {known}")
    processes = joined[slot]
    if number and not 1 <= int(number) <= len(processes):
        raise ConfigError(f"--process {process}: {slot} had {len(processes)} processes; give {slot}.1 or a later one")
    return processes[int(number or 0) - 1]


def printed_by(process: WorkerJoined, *, lines: int, connect: Callable[[], object]) -> str:
    """Return the last lines of a process's stdout and stderr, each with a heading.

    Args:
        process: Its event, see `joined_process`.
        lines: Number of lines of each.
        connect: Connects to the job's cluster; called if the files are on another machine.

    Raises:
        ConfigError: The process prints to no file, or the files can no longer be read.
    """
    paths = list(dict.fromkeys(path for path in (process.stdout, process.stderr) if path))
    if not paths:
        raise ConfigError(
            f"--process {process.slot}: it prints to a terminal or a pipe, not to a file; look where it was started"
        )
    if process.machine == machine_id():
        texts = read_ends(paths, lines)
    else:
        connect()
        texts = _read_on_node(process, paths, lines)
    if all(text is None for text in texts):
        raise ConfigError(
            f"--process {process.slot}: {' and '.join(paths)} on node {process.node} no longer exist; they end with "
            "the directory of Ray's session"
        )
    return "".join(
        f"==> {process.slot} (pid {process.pid}): {path} <==\n{'' if text is None else text}\n"
        for path, text in zip(paths, texts, strict=True)
    )


def read_ends(paths: Sequence[str], lines: int) -> list[str | None]:
    """Return the last lines of each file, None for one that cannot be read.

    Ray's marks are left out.
    """
    return [_read_end(path, lines) for path in paths]


def _read_end(path: str, lines: int) -> str | None:
    moved = os.path.join(os.path.dirname(path), MOVED, os.path.basename(path))
    try:
        with open(path if os.path.exists(path) else moved, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - MAX_BYTES))
            kept = [line for line in f.read().splitlines() if not line.startswith(RAY_LINES)]
    except OSError:
        return None
    return "".join(f"{line.decode(errors='replace')}\n" for line in kept[-lines:])


def _read_on_node(process: WorkerJoined, paths: Sequence[str], lines: int) -> list[str | None]:
    import ray

    read = start_task(process.node, read_ends, paths, lines)
    try:
        texts: list[str | None] = get_value(read, what="the output", timeout_s=READ_TIMEOUT_S)
    except (ray.exceptions.RayError, CallTimeout) as error:
        raise ConfigError(
            f"--process {process.slot}: its node {process.node} does not answer ({type(error).__name__}); its files "
            f"are there: {', '.join(paths)}"
        ) from error
    return texts
