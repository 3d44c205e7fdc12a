"""State machine of the master: `reduce(state, event) -> (state, effects)`, a pure function.

Detectors (a closed connection, missing heartbeats, a dead node) and reports of the trainer become events. The master
(`service/job_master.py`) executes the effects, possibly twice. A state is a fold over the journal's events, so a
restarted master has the state of the previous one. Nothing here waits, sends or kills.

The master does not decide about recovery. The process that restarts something decides by `failure_policy.py`, and
reports its decision (`RecoveryDecided`). A failure ends the job here only if nobody restarts what was lost
(`JobStarted.restarts_workers`, `JobStarted.restarts_driver`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybridrl.master.state import events
from hybridrl.master.state.tables import JOB, JOB_ENDS, ROLE, WORKER, JobPhase, RolePhase, WorkerPhase, next_state

MAX_LISTED = 20  # failures, decisions and warnings each
OF_JOB = ("job", "run", "replicas", "restarts_workers", "restarts_driver", "supervisor_pid", "driver")
OF_WORKER = ("name", "pid", "node", "machine", "rank", "group_size")
MOVES: Mapping[type[events.JobEvent], str] = {  # event of a worker -> event of its state table
    events.WorkerSilent: "go_silent",
    events.WorkerRecovered: "recover",
    events.WorkerLeft: "end",
    events.WorkerReplaced: "replace",
}


@dataclass(frozen=True)
class WorkerState:
    """State of one slot.

    A restarted driver finds the process by name, pid, node, rank and group_size.

    Attributes:
        incarnation: Number of processes that this slot has had.
        exit_reason: How its process ended, as a sentence.
    """

    state: str = WorkerPhase.STARTING
    name: str = ""
    pid: int = 0
    node: str = ""
    machine: str = ""
    incarnation: int = 0
    exit_reason: str = ""
    rank: int = 0
    group_size: int = 1


@dataclass(frozen=True)
class JobState:
    """The state of a job after some events of its journal."""

    state: str = JobPhase.STARTING
    job: str = ""
    run: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    workers: dict[str, WorkerState] = field(default_factory=dict)
    replicas: tuple[str, ...] = ()
    restarts_workers: bool = False
    restarts_driver: bool = False
    supervisor_pid: int = 0
    driver: str = events.TRAINER
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest ones that the trainer reported
    commit: str = ""
    commit_step: int = 0
    failures: tuple[str, ...] = ()  # the newest ones, as sentences
    decisions: tuple[str, ...] = ()  # the newest ones, and how they ended, as sentences
    warnings: tuple[str, ...] = ()  # the newest ones
    reason: str = ""  # of the end


def to_json(state: JobState) -> dict[str, Any]:
    """Return a state as a JSON-compatible dict."""
    return {**vars(state), "workers": {slot: vars(worker) for slot, worker in state.workers.items()}}


def from_json(data: dict[str, Any]) -> JobState:
    """Return the state that `to_json` wrote."""
    known = {field.name: data[field.name] for field in fields(JobState)}  # older versions wrote more
    tuples = {name: tuple(data[name]) for name in ("replicas", "failures", "decisions", "warnings")}
    workers = {slot: WorkerState(**worker) for slot, worker in data["workers"].items()}
    return JobState(**(known | tuples | {"workers": workers}))


# -- the reducer


def reduce(state: JobState, event: events.JobEvent) -> tuple[JobState, tuple[events.Effect, ...]]:
    """Return the state after the event, and the effects to execute.

    After the end of a job nothing changes, but a supervisor's decision not to continue is recorded.
    """
    if state.state in JOB_ENDS:
        return (_record(state, event) if isinstance(event, events.RecoveryDecided) else state), ()
    match event:
        case events.WarningRaised():
            text = f"{event.slot}: {event.text}"
            return replace(state, warnings=(*state.warnings, text)[-MAX_LISTED:]), (events.NotifyTrainer(text),)
        case events.StopRequested():
            following = _move_job(replace(state, reason=event.reason), "stop")
            return following, (events.StopTrainer(event.reason),) if following.state == JobPhase.STOPPING else ()
        case events.JobEnded():
            return _end_job(state, "succeed" if event.succeeded else "abort", event.reason)
        case events.WorkerFailed():
            return _fail(state, event)
        case events.RanksChanged():
            return _change_ranks(state, event), ()
        case _:
            return _record(state, event), ()


def unfinished_effects(state: JobState) -> tuple[events.Effect, ...]:
    """Return the effects that a restarted master has to execute (again)."""
    if state.state in JOB_ENDS:
        return (events.ReleaseJob(state.reason),)
    if state.state == JobPhase.STOPPING:
        return (events.StopTrainer(state.reason),)
    driver = state.workers.get(state.driver, WorkerState())
    lost = state.restarts_driver and driver.state == WorkerPhase.LOST
    return (events.RecoveryNeeded(state.driver, driver.exit_reason),) if lost else ()


def _record(state: JobState, event: events.JobEvent) -> JobState:
    """Return the state after an event without effects."""
    match event:
        case events.JobStarted():
            return _start_job(state, event)
        case events.WorkerJoined():
            return _add_worker(state, event)
        case events.WorkerSilent() | events.WorkerRecovered() | events.WorkerLeft() | events.WorkerReplaced():
            return _move_worker(state, event.slot, event.pid, MOVES[type(event)])
        case events.StepCompleted():
            return _step(state, event)
        case events.CheckpointCommitted():
            return replace(state, step=max(state.step, event.step), commit=event.path, commit_step=event.step)
        case events.RecoveryDecided() | events.RecoveryCompleted():
            return _list_decision(state, str(event))
    return state


def _list_decision(state: JobState, text: str) -> JobState:
    return replace(state, decisions=(*state.decisions, f"step {state.step}: {text}")[-MAX_LISTED:])


def _start_job(state: JobState, event: events.JobStarted) -> JobState:
    if state.run:  # sent again to a restarted master
        return state
    roles = dict.fromkeys(event.roles, str(RolePhase.STARTING))
    return replace(state, **_said(event, OF_JOB), roles=roles, sizes=dict(event.roles))


def _add_worker(state: JobState, event: events.WorkerJoined) -> JobState:
    worker = state.workers.get(event.slot, WorkerState())
    if worker.pid == event.pid and worker.state in (WorkerPhase.ALIVE, WorkerPhase.SILENT):
        return _move_worker(state, event.slot, event.pid, "recover")
    if worker.state == WorkerPhase.ENDED and worker.pid != event.pid:  # the slot has another process
        worker = WorkerState(incarnation=worker.incarnation)
    joined = next_state(WORKER, next_state(WORKER, worker.state, "replace"), "join")
    if joined != WorkerPhase.ALIVE:
        return state
    worker = WorkerState(joined, incarnation=worker.incarnation + 1, **_said(event, OF_WORKER))
    label = events.role_of_slot(event.slot)
    state = replace(state, workers=state.workers | {event.slot: worker})
    if event.slot == state.driver:
        return _recovered_if_complete(state)
    sizes = state.sizes | {label: max(event.group_size, state.sizes.get(label, 0))}
    state = replace(state, sizes=sizes, roles={label: str(RolePhase.STARTING)} | state.roles)
    return _recovered_if_complete(_move_role(state, label, "all_alive") if _are_all_alive(state, label) else state)


def _said(event: events.JobEvent, names: Sequence[str]) -> dict[str, Any]:
    """Return what an event says, for the attributes of these names of a state."""
    return {name: getattr(event, name) for name in names}


def _are_all_alive(state: JobState, label: str) -> bool:
    if len(state.workers) < state.sizes[label]:  # most joins of a large job end here
        return False
    alive = sum(
        events.role_of_slot(slot) == label and worker.state == WorkerPhase.ALIVE
        for slot, worker in state.workers.items()
    )
    return alive >= state.sizes[label]


def _change_ranks(state: JobState, event: events.RanksChanged) -> JobState:
    """End all workers; those of the new number join as the processes of new slots do."""
    workers = {
        slot: worker if slot == state.driver else replace(worker, state=next_state(WORKER, worker.state, "end"))
        for slot, worker in state.workers.items()
    }
    state = _list_decision(replace(state, workers=workers, sizes=state.sizes | event.sizes), event.text)
    for label in state.roles:
        state = _move_role(state, label, "rebuild")
    return _move_job(state, "failure")


def _recovered_if_complete(state: JobState) -> JobState:
    """Mark the job as recovered if none of its workers is lost or starting."""
    if next_state(JOB, state.state, "recovered") == state.state:
        return state
    lost = (worker.state in (WorkerPhase.LOST, WorkerPhase.STARTING) for worker in state.workers.values())
    return state if any(lost) else _move_job(state, "recovered")


def _step(state: JobState, event: events.StepCompleted) -> JobState:
    state = _move_job(state, "begin")
    if event.metrics:
        state = replace(state, metrics=dict(event.metrics))
    if event.step <= state.step:  # reported twice, or replayed
        return state
    return _recovered_if_complete(replace(state, step=event.step))


def _fail(state: JobState, event: events.WorkerFailed) -> tuple[JobState, tuple[events.Effect, ...]]:
    worker = state.workers.get(event.slot, WorkerState())
    is_of_another = event.pid and worker.pid and event.pid != worker.pid
    is_known = worker.state in (WorkerPhase.LOST, WorkerPhase.ENDED) or _is_being_replaced(worker, event)
    if is_of_another or (event.kind in (events.Kind.DIED, events.Kind.NODE) and is_known):
        return state, ()  # reported already, or of a process that was replaced meanwhile
    if event.kind == events.Kind.FROZEN:
        return _freeze(state, event, worker)
    if state.state == JobPhase.STOPPING:
        lost = _mark_lost(state, event)
        return _end_job(lost, "stopped", state.reason) if event.slot == state.driver else (lost, ())
    if (
        event.kind in (events.Kind.DIED, events.Kind.NODE)
        and state.roles.get(events.role_of_slot(event.slot)) == RolePhase.REBUILDING
    ):
        return _mark_lost(state, event), ()  # a rebuild also kills the healthy processes of the role
    failures = (*state.failures, f"{event.slot} at step {state.step}: {event.evidence}")[-MAX_LISTED:]
    state = replace(state, failures=failures)
    if event.kind == events.Kind.EXCEPTION:
        return state, ()
    lost = state if event.kind == events.Kind.CALL else _mark_lost(state, event)
    if not (state.restarts_driver if event.slot == state.driver else state.restarts_workers):
        return _end_job(lost, "abort", f"{event.slot}: {event.evidence}")
    return _await_recovery(lost, event)


def _is_being_replaced(worker: WorkerState, event: events.WorkerFailed) -> bool:
    return worker.state == WorkerPhase.STARTING and event.pid != 0 and worker.pid == event.pid


def _freeze(
    state: JobState, event: events.WorkerFailed, worker: WorkerState
) -> tuple[JobState, tuple[events.Effect, ...]]:
    """Kill a frozen process first. Its death is then a failure like any other."""
    if worker.state not in (WorkerPhase.ALIVE, WorkerPhase.SILENT):
        return state, ()
    workers = state.workers | {event.slot: replace(worker, exit_reason=event.evidence)}
    kill = events.KillProcess(event.slot, worker.name, worker.pid, worker.node, worker.machine, event.evidence)
    return replace(state, workers=workers), (kill,)


def _await_recovery(state: JobState, event: events.WorkerFailed) -> tuple[JobState, tuple[events.Effect, ...]]:
    """Mark what a failure takes away until somebody has restarted it."""
    label = events.role_of_slot(event.slot)
    if event.kind != events.Kind.CALL:
        is_replica = label in state.replicas and event.slot != state.driver
        state = _move_job(_move_role(state, label, "replica_lost" if is_replica else "rebuild"), "failure")
    return state, (events.RecoveryNeeded(event.slot, f"{event.slot}: {event.evidence}"),)


def _mark_lost(state: JobState, event: events.WorkerFailed) -> JobState:
    worker = state.workers.get(event.slot, WorkerState())
    exit_reason = f"{worker.exit_reason}; the master killed it for that" if worker.exit_reason else event.evidence
    lost = replace(worker, state=next_state(WORKER, worker.state, "fail"), exit_reason=exit_reason)
    return replace(state, workers=state.workers | {event.slot: lost})


def _end_job(state: JobState, how: str, reason: str) -> tuple[JobState, tuple[events.Effect, ...]]:
    state = _move_job(replace(state, reason=reason), how)
    roles = {label: next_state(ROLE, role, "end") for label, role in state.roles.items()}
    workers = {
        slot: replace(worker, state=next_state(WORKER, worker.state, "end")) for slot, worker in state.workers.items()
    }
    return replace(state, roles=roles, workers=workers), (events.ReleaseJob(reason),)


def _move_worker(state: JobState, slot: str, pid: int, event: str) -> JobState:
    """Apply an event to a worker's state.

    An event of a process that its slot no longer holds changes nothing.
    """
    worker = state.workers.get(slot)
    if worker is None or worker.pid != pid:
        return state
    return replace(
        state, workers=state.workers | {slot: replace(worker, state=next_state(WORKER, worker.state, event))}
    )


def _move_job(state: JobState, event: str) -> JobState:
    return replace(state, state=next_state(JOB, state.state, event))


def _move_role(state: JobState, label: str, event: str) -> JobState:
    if label not in state.roles:
        return state
    return replace(state, roles=state.roles | {label: next_state(ROLE, state.roles[label], event)})
