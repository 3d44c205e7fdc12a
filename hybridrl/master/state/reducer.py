"""What the master knows and what it decides: `reduce(state, event) -> (state, effects)`, pure. Nothing here waits, asks
or ends anything.

Detectors (a closed connection, silence, a dead node, the trainer's own words) become events; effects are carried out by
`actor.py` and may be carried out twice. A state is a fold over the journal's events, so a master that is started again
knows what the old one knew.

A failure is answered on the lowest level that fits it, that somebody in this job can carry out (`Begun.levels`), and
whose budget is not spent: 0 repeat the call · 1 start the replica again · 2 rebuild the role · 3 rebuild what depends
on it · 4 start the trainer again · 5 start the job from its last commit · 6 end it with a report. Steps that go well
refill the budgets. The same exception at the same step is a bug of the program and ends the job, whatever budget is
left.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.master.state.events import (
    TRAINER,
    Begun,
    Committed,
    Effect,
    Ended,
    EndJob,
    EndProcess,
    Event,
    Failed,
    Joined,
    Kind,
    Left,
    Level,
    Noticed,
    Recover,
    Silenced,
    Spoke,
    Stepped,
    StopAsked,
    StopTrainer,
    TellTrainer,
    label_of,
)
from hybridrl.master.state.tables import JOB, JOB_ENDS, ROLE, WORKER, Job, Role, Table, Worker, advance

REFILL_STEPS = 10  # so many steps after the last failure, the budgets are full again
BUDGETS = {0: 10, 1: 10, 2: 3, 3: 3, 4: 3, 5: 3}  # failures a level may answer until healthy progress refills it
KEPT_FAILURES = 20


@dataclass(frozen=True)
class WorkerState:
    """name, pid, node, rank, group_size: what a driver needs to find it again. life: how often its slot was filled."""

    state: str = Worker.STARTING
    name: str = ""
    pid: int = 0
    node: str = ""
    machine: str = ""
    life: int = 0
    account: str = ""  # of its end, in words
    rank: int = 0
    group_size: int = 1


@dataclass(frozen=True)
class JobState:
    state: str = Job.STARTING
    job: str = ""
    run: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    workers: dict[str, WorkerState] = field(default_factory=dict)
    replicas: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    limits_itself: bool = False
    program: int = 0
    spent: dict[int, int] = field(default_factory=dict)  # level -> failures answered since the last refill
    healthy_steps: int = 0  # since the last failure
    step: int = 0
    commit: str = ""
    last_exception: tuple[str, int] = ("", -1)  # signature, step
    failures: tuple[str, ...] = ()  # the newest ones, in sentences
    notices: tuple[str, ...] = ()  # the newest ones
    reason: str = ""  # of the end


def to_json(state: JobState) -> dict[str, Any]:
    """Return a state as JSON has it."""
    return {
        **vars(state),
        "workers": {slot: vars(worker) for slot, worker in state.workers.items()},
        "spent": {str(level): count for level, count in state.spent.items()},
    }


def from_json(data: dict[str, Any]) -> JobState:
    """Return the state that `to_json` wrote."""
    tuples = {name: tuple(data[name]) for name in ("replicas", "levels", "failures", "notices", "last_exception")}
    workers = {slot: WorkerState(**worker) for slot, worker in data["workers"].items()}
    return JobState(
        **(data | tuples | {"workers": workers, "spent": {int(level): count for level, count in data["spent"].items()}})
    )


# -- the reducer


def reduce(state: JobState, event: Event) -> tuple[JobState, tuple[Effect, ...]]:
    """Return the state after the event and what is to be done. After the end of a job nothing changes any more."""
    if state.state in JOB_ENDS:
        return state, ()
    match event:
        case Begun():
            return _begin(state, event), ()
        case Joined():
            return _join(state, event), ()
        case Silenced():
            return _of_worker(state, event.slot, event.pid, "hush"), ()
        case Spoke():
            return _of_worker(state, event.slot, event.pid, "speak"), ()
        case Stepped():
            return _step(state, event), ()
        case Committed():
            return _commit(state, event), ()
        case Left():
            return _of_worker(state, event.slot, event.pid, "end"), ()
        case Noticed():
            text = f"{event.slot}: {event.text}"
            return replace(state, notices=(*state.notices, text)[-KEPT_FAILURES:]), (TellTrainer(text),)
        case StopAsked():
            following = _advance_job(replace(state, reason=event.reason), "stop")
            return following, (StopTrainer(event.reason),) if following.state == Job.STOPPING else ()
        case Ended():
            return _end(state, "succeed" if event.succeeded else "abort", event.reason)
        case Failed():
            return _fail(state, event)


def pending(state: JobState) -> tuple[Effect, ...]:
    """Return the effects that a master which was just started again has to carry out (again)."""
    if state.state in JOB_ENDS:
        return (EndJob(state.reason),)
    if state.state == Job.STOPPING:
        return (StopTrainer(state.reason),)
    lost = Level.TRAINER in state.levels and state.workers.get(TRAINER, WorkerState()).state == Worker.LOST
    return (Recover(Level.TRAINER, (TRAINER,), state.workers[TRAINER].account),) if lost else ()


def _begin(state: JobState, event: Begun) -> JobState:
    if state.run:  # told twice: a master that was started again
        return state
    roles = dict.fromkeys(event.roles, str(Role.STARTING))
    known = replace(state, job=event.job, run=event.run, program=event.program, roles=roles, sizes=dict(event.roles))
    return replace(known, replicas=tuple(event.replicas), levels=tuple(event.levels), limits_itself=event.limits_itself)


def _join(state: JobState, event: Joined) -> JobState:
    worker = state.workers.get(event.slot, WorkerState())
    if worker.pid == event.pid and worker.state in (Worker.ALIVE, Worker.SILENT):
        return _of_worker(state, event.slot, event.pid, "speak")
    moved = advance(WORKER, advance(WORKER, worker.state, "replace"), "join")
    if moved != Worker.ALIVE:
        return state
    place = {"rank": event.rank, "group_size": event.group_size}
    worker = WorkerState(moved, event.name, event.pid, event.node, event.machine, worker.life + 1, **place)
    label = label_of(event.slot)
    state = replace(state, workers=state.workers | {event.slot: worker})
    if event.slot == TRAINER:
        return _when_whole(state)
    sizes = state.sizes | {label: max(event.group_size, state.sizes.get(label, 0))}
    state = replace(state, sizes=sizes, roles={label: str(Role.STARTING)} | state.roles)
    alive = sum(label_of(slot) == label and other.state == Worker.ALIVE for slot, other in state.workers.items())
    return _when_whole(_advance_role(state, label, "all_alive") if alive >= sizes[label] else state)


def _when_whole(state: JobState) -> JobState:
    """A job whose workers are all there again has recovered."""
    lost = [slot for slot, worker in state.workers.items() if worker.state in (Worker.LOST, Worker.STARTING)]
    return state if lost else _advance_job(state, "recovered")


def _step(state: JobState, event: Stepped) -> JobState:
    state = _advance_job(state, "begin")
    if event.step <= state.step:  # told twice, or played again
        return state
    steps = state.healthy_steps + 1
    return _when_whole(
        replace(state, step=event.step, healthy_steps=steps, spent={} if steps >= REFILL_STEPS else state.spent)
    )


def _commit(state: JobState, event: Committed) -> JobState:
    return replace(state, step=max(state.step, event.step), commit=event.path)


def _fail(state: JobState, event: Failed) -> tuple[JobState, tuple[Effect, ...]]:
    worker = state.workers.get(event.slot, WorkerState())
    of_another = event.pid and worker.pid and event.pid != worker.pid
    if of_another or (event.kind in (Kind.DIED, Kind.NODE) and worker.state in (Worker.LOST, Worker.ENDED)):
        return state, ()  # told already, or of a process that was replaced meanwhile
    if event.kind == Kind.FROZEN:
        return _freeze(state, event, worker)
    if state.state == Job.STOPPING:
        lost = _lose(state, event)
        return _end(lost, "stopped", state.reason) if event.slot == TRAINER else (lost, ())
    if event.kind in (Kind.DIED, Kind.NODE) and state.roles.get(label_of(event.slot)) == Role.REBUILDING:
        return _lose(state, event), ()  # whoever rebuilds a role ends those of its processes that are well
    level = _level(state, event)
    lost = state if event.kind in (Kind.CALL, Kind.EXCEPTION) else _lose(state, event)
    lost = replace(
        lost, failures=(*lost.failures, f"{event.slot} at step {state.step}: {event.evidence}")[-KEPT_FAILURES:]
    )
    if event.kind == Kind.EXCEPTION:
        lost = replace(lost, last_exception=(event.signature, state.step))
    if level == Level.ABORT:
        return _end(lost, "abort", f"{event.slot}: {event.evidence}")
    return _answer(lost, event, level)


def _freeze(state: JobState, event: Failed, worker: WorkerState) -> tuple[JobState, tuple[Effect, ...]]:
    """A frozen process is ended first; its death is then a failure like any other."""
    if worker.state not in (Worker.ALIVE, Worker.SILENT):
        return state, ()
    workers = state.workers | {event.slot: replace(worker, account=event.evidence)}
    end = EndProcess(event.slot, worker.name, worker.pid, worker.node, worker.machine, event.evidence)
    return replace(state, workers=workers), (end,)


def _answer(state: JobState, event: Failed, level: int) -> tuple[JobState, tuple[Effect, ...]]:
    slots = _slots(state, event.slot, level)
    state = replace(state, spent=state.spent | {level: state.spent.get(level, 0) + 1}, healthy_steps=0)
    if level != Level.CALL:
        label = label_of(event.slot)
        state = _advance_job(
            _advance_role(state, label, "replica_lost" if level == Level.REPLICA else "rebuild"), "failure"
        )
    return state, (Recover(level, slots, f"{event.slot}: {event.evidence}"),)


def _slots(state: JobState, slot: str, level: int) -> tuple[str, ...]:
    """Whose processes a level makes anew.

    Which roles depend on each other is the carrier's to know; here they are all that work.
    """
    if level in (Level.CALL, Level.REPLICA, Level.TRAINER):
        return (slot,) if level != Level.CALL else ()
    if level == Level.ROLE:
        return tuple(other for other in state.workers if label_of(other) == label_of(slot))
    return tuple(other for other in state.workers if other != TRAINER or level == Level.JOB)


def _level(state: JobState, event: Failed) -> int:
    if event.kind == Kind.EXCEPTION and (event.signature, state.step) == state.last_exception:
        return Level.ABORT
    lowest = Level.ROLE
    if event.kind == Kind.CALL:
        lowest = Level.CALL
    elif event.slot == TRAINER:
        lowest = Level.TRAINER
    elif label_of(event.slot) in state.replicas and event.kind != Kind.EXCEPTION:
        lowest = Level.REPLICA
    fit = [
        level
        for level in range(lowest, Level.ABORT)
        if level != Level.REPLICA or label_of(event.slot) in state.replicas
    ]
    return next((level for level in fit if level in state.levels and _has_budget(state, level)), Level.ABORT)


def _has_budget(state: JobState, level: int) -> bool:
    return state.limits_itself or state.spent.get(level, 0) < BUDGETS[level]


def _lose(state: JobState, event: Failed) -> JobState:
    worker = state.workers.get(event.slot, WorkerState())
    account = f"{worker.account}; it was ended for that" if worker.account else event.evidence
    lost = replace(worker, state=advance(WORKER, worker.state, "lose"), account=account)
    return replace(state, workers=state.workers | {event.slot: lost})


def _end(state: JobState, how: str, reason: str) -> tuple[JobState, tuple[Effect, ...]]:
    state = _advance_job(replace(state, reason=reason), how)
    roles = {label: advance(ROLE, role, "end") for label, role in state.roles.items()}
    workers = {
        slot: replace(worker, state=advance(WORKER, worker.state, "end")) for slot, worker in state.workers.items()
    }
    return replace(state, roles=roles, workers=workers), (EndJob(reason),)


def _of_worker(state: JobState, slot: str, pid: int, event: str) -> JobState:
    """Move one worker; a word about a process that its slot no longer holds moves nothing."""
    worker = state.workers.get(slot)
    if worker is None or worker.pid != pid:
        return state
    return replace(state, workers=state.workers | {slot: replace(worker, state=advance(WORKER, worker.state, event))})


def _advance_job(state: JobState, event: str) -> JobState:
    return replace(state, state=advance(JOB, state.state, event))


def _advance_role(state: JobState, label: str, event: str) -> JobState:
    table: Table = ROLE
    return (
        replace(state, roles=state.roles | {label: advance(table, state.roles[label], event)})
        if label in state.roles
        else state
    )
