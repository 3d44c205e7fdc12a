"""The states of a job, its roles and its workers, as tables: what may follow what. `hybridrl job states` prints them.

A table maps (state, event) to the next state. An event without an entry changes nothing: a death that is told twice, or
a word from a process that was replaced meanwhile, is no reason to move. Which event a failure is, and what is done
about it, is `reducer.py`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

Table = Mapping[tuple[str, str], str]


class Job(StrEnum):
    STARTING = "starting"  # processes are being made, models loaded
    RUNNING = "running"
    RECOVERING = "recovering"  # something is lost, and what replaces it is on its way
    STOPPING = "stopping"  # somebody asked for the end; the trainer may still commit
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class Role(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"  # replicas are missing, the others serve
    REBUILDING = "rebuilding"  # all its processes are made anew
    ENDED = "ended"


class Worker(StrEnum):
    STARTING = "starting"  # planned or being replaced; it has not spoken yet
    ALIVE = "alive"
    SILENT = "silent"  # its process is there, its heartbeats are not
    LOST = "lost"
    ENDED = "ended"  # as it should


JOB: Table = {
    (Job.STARTING, "begin"): Job.RUNNING,
    (Job.STARTING, "failure"): Job.RECOVERING,
    (Job.RUNNING, "failure"): Job.RECOVERING,
    (Job.RECOVERING, "recovered"): Job.RUNNING,
    (Job.STARTING, "stop"): Job.STOPPING,
    (Job.RUNNING, "stop"): Job.STOPPING,
    (Job.RECOVERING, "stop"): Job.STOPPING,
    **{(state, "succeed"): Job.SUCCEEDED for state in (Job.STARTING, Job.RUNNING, Job.RECOVERING, Job.STOPPING)},
    **{(state, "abort"): Job.FAILED for state in (Job.STARTING, Job.RUNNING, Job.RECOVERING)},
    (Job.STOPPING, "abort"): Job.STOPPED,
    (Job.STOPPING, "stopped"): Job.STOPPED,
}
ROLE: Table = {
    (Role.STARTING, "all_alive"): Role.READY,
    (Role.STARTING, "rebuild"): Role.REBUILDING,
    (Role.READY, "replica_lost"): Role.DEGRADED,
    (Role.READY, "rebuild"): Role.REBUILDING,
    (Role.DEGRADED, "all_alive"): Role.READY,
    (Role.DEGRADED, "rebuild"): Role.REBUILDING,
    (Role.REBUILDING, "all_alive"): Role.READY,
    **{(state, "end"): Role.ENDED for state in (Role.STARTING, Role.READY, Role.DEGRADED, Role.REBUILDING)},
}
WORKER: Table = {
    (Worker.STARTING, "join"): Worker.ALIVE,
    (Worker.STARTING, "lose"): Worker.LOST,
    (Worker.ALIVE, "hush"): Worker.SILENT,
    (Worker.ALIVE, "lose"): Worker.LOST,
    (Worker.ALIVE, "replace"): Worker.STARTING,
    (Worker.SILENT, "speak"): Worker.ALIVE,
    (Worker.SILENT, "lose"): Worker.LOST,
    (Worker.SILENT, "replace"): Worker.STARTING,
    (Worker.LOST, "replace"): Worker.STARTING,
    **{(state, "end"): Worker.ENDED for state in (Worker.STARTING, Worker.ALIVE, Worker.SILENT, Worker.LOST)},
}


class Machine(NamedTuple):
    """states: all there are. ends: those that nothing leaves."""

    name: str
    states: type[StrEnum]
    table: Table
    ends: frozenset[str]


MACHINES = (
    Machine("job", Job, JOB, frozenset({Job.SUCCEEDED, Job.FAILED, Job.STOPPED})),
    Machine("role", Role, ROLE, frozenset({Role.ENDED})),
    Machine("worker", Worker, WORKER, frozenset({Worker.ENDED})),
)
JOB_ENDS = MACHINES[0].ends


def advance(table: Table, state: str, event: str) -> str:
    """Return the next state; the same one where the table has no entry."""
    return table.get((state, event), state)


def to_text(machines: tuple[Machine, ...] = MACHINES) -> str:
    """Return the tables for a terminal: a block for each machine, a line for each entry."""
    blocks = []
    for machine in machines:
        lines = [f"{machine.name}: {', '.join(machine.states)}; ends: {', '.join(sorted(machine.ends))}"]
        lines += [f"  {state:<12} {event:<14} -> {following}" for (state, event), following in machine.table.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
