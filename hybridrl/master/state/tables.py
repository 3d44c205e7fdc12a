"""State tables of a job, its roles and its workers. `hybridrl job states` prints them.

A table maps (state, event) to the next state. An event without an entry changes nothing, so a death that is reported
twice, or a message from a replaced process, is harmless. `reducer.py` decides which event a failure is;
`failure_policy.py` has what is done about it.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

Table = Mapping[tuple[str, str], str]


class JobPhase(StrEnum):
    """The states of a job."""

    STARTING = "starting"  # processes start, models load
    RUNNING = "running"
    RECOVERING = "recovering"  # a process is lost and its replacement is not ready yet
    STOPPING = "stopping"  # a stop was requested; the trainer may still commit
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class RolePhase(StrEnum):
    """The states of a role."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"  # replicas are missing, the others serve
    REBUILDING = "rebuilding"  # all its processes are replaced
    ENDED = "ended"


class WorkerPhase(StrEnum):
    """The states of a worker."""

    STARTING = "starting"  # planned or being replaced; it has not sent a message yet
    ALIVE = "alive"
    SILENT = "silent"  # the process exists, but sends no heartbeats
    LOST = "lost"
    ENDED = "ended"  # intentionally


def _from_each(states: Iterable[str], event: str, following: str) -> Table:
    return {(state, event): following for state in states}


_UNSTOPPED = (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RECOVERING)
JOB: Table = {
    (JobPhase.STARTING, "begin"): JobPhase.RUNNING,
    **_from_each((JobPhase.STARTING, JobPhase.RUNNING), "failure", JobPhase.RECOVERING),
    (JobPhase.RECOVERING, "recovered"): JobPhase.RUNNING,
    **_from_each(_UNSTOPPED, "stop", JobPhase.STOPPING),
    **_from_each((*_UNSTOPPED, JobPhase.STOPPING), "succeed", JobPhase.SUCCEEDED),
    **_from_each(_UNSTOPPED, "abort", JobPhase.FAILED),
    (JobPhase.STOPPING, "abort"): JobPhase.STOPPED,
    (JobPhase.STOPPING, "stopped"): JobPhase.STOPPED,
}
ROLE: Table = {
    **_from_each((RolePhase.STARTING, RolePhase.DEGRADED, RolePhase.REBUILDING), "all_alive", RolePhase.READY),
    (RolePhase.READY, "replica_lost"): RolePhase.DEGRADED,
    **_from_each((RolePhase.STARTING, RolePhase.READY, RolePhase.DEGRADED), "rebuild", RolePhase.REBUILDING),
    **_from_each((state for state in RolePhase if state != RolePhase.ENDED), "end", RolePhase.ENDED),
}
WORKER: Table = {
    (WorkerPhase.STARTING, "join"): WorkerPhase.ALIVE,
    (WorkerPhase.ALIVE, "go_silent"): WorkerPhase.SILENT,
    (WorkerPhase.SILENT, "recover"): WorkerPhase.ALIVE,
    **_from_each((WorkerPhase.STARTING, WorkerPhase.ALIVE, WorkerPhase.SILENT), "fail", WorkerPhase.LOST),
    **_from_each((WorkerPhase.ALIVE, WorkerPhase.SILENT, WorkerPhase.LOST), "replace", WorkerPhase.STARTING),
    **_from_each((state for state in WorkerPhase if state != WorkerPhase.ENDED), "end", WorkerPhase.ENDED),
}


class StateMachine(NamedTuple):
    """A named table with all its states and its final states (`ends`)."""

    name: str
    states: type[StrEnum]
    table: Table
    ends: frozenset[str]


STATE_MACHINES = (
    StateMachine("job", JobPhase, JOB, frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED})),
    StateMachine("role", RolePhase, ROLE, frozenset({RolePhase.ENDED})),
    StateMachine("worker", WorkerPhase, WORKER, frozenset({WorkerPhase.ENDED})),
)
JOB_ENDS = STATE_MACHINES[0].ends


def next_state(table: Table, state: str, event: str) -> str:
    """Return the next state, or the same one if the table has no entry."""
    return table.get((state, event), state)


def to_text(machines: tuple[StateMachine, ...] = STATE_MACHINES) -> str:
    """Return the tables for a terminal: a block per state machine, a line per entry."""
    blocks = []
    for machine in machines:
        lines = [f"{machine.name}: {', '.join(machine.states)}; ends: {', '.join(sorted(machine.ends))}"]
        lines += [f"  {state:<12} {event:<14} -> {following}" for (state, event), following in machine.table.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
