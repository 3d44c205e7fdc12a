"""Events (what can happen to a job) and effects (what the master can do about it).

The journal stores the events as JSON. `reducer.py` maps events to effects; the master (`service/job_master.py`)
executes the effects.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from hybridrl.errors import JournalError

TRAINER = "trainer"  # the slot of the driver
SUPERVISOR = "supervisor"  # the slot of the driver of a submitted job, whose trainer is a worker
DRIVERS = (TRAINER, SUPERVISOR)


class Kind(StrEnum):
    """Kind of a failure. The value appears in the journal and in reports."""

    CALL = "call"  # a call missed its deadline; its process still exists
    DIED = "died"
    FROZEN = "frozen"  # the process exists but is stopped; the master kills it, and then it is lost
    NODE = "node"
    EXCEPTION = "exception"  # only in journals of older versions; now it is the reason of the job's end


# -- events, as the journal stores them


@dataclass(frozen=True)
class JobEvent:
    """What can happen to a job."""


@dataclass(frozen=True)
class JobStarted(JobEvent):
    """The first event.

    Attributes:
        roles: Label of the processes (roles joined by "+") -> number of processes.
        replicas: Labels that go on without some of their processes.
        restarts_workers: Whether this job restarts its lost workers. If not, the first loss ends it.
        restarts_driver: Whether somebody restarts this job's driver. If not, its loss ends the job.
        supervisor_pid: Process id, on the trainer's node, of the supervisor that restarts the trainer. 0: none.
        driver: Slot of the process that reports the job's progress and outcome: the trainer, or the job supervisor of a
            submitted job, whose trainer is a worker.
        spec: The spec of a submitted job, as JSON; `hybridrl job resume` starts it again.
        plan: Its processes and placement, as a table.
    """

    job: str
    run: str
    roles: dict[str, int] = field(default_factory=dict)
    replicas: tuple[str, ...] = ()
    restarts_workers: bool = False
    restarts_driver: bool = False
    supervisor_pid: int = 0
    driver: str = TRAINER
    spec: str = ""
    plan: str = ""


@dataclass(frozen=True)
class WorkerJoined(JobEvent):
    """A process sent its first message, to this master or to the one before.

    Attributes:
        slot: `{label}-{rank}`, or the trainer's slot.
        rank: Rank among the `group_size` processes of its label.
        stdout: File that it prints to. "": not to a file.
        stderr: The same.
    """

    slot: str
    name: str
    pid: int
    node: str
    machine: str = ""
    group_size: int = 1
    rank: int = 0
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class WorkerSilent(JobEvent):
    """A process exists but sends no heartbeats."""

    slot: str
    pid: int
    evidence: str


@dataclass(frozen=True)
class WorkerRecovered(JobEvent):
    """A silent process sent a message again."""

    slot: str
    pid: int


@dataclass(frozen=True)
class WorkerFailed(JobEvent):
    """A failure of a process or of a call.

    Attributes:
        signature: Only in journals of older versions.
    """

    kind: str
    slot: str
    pid: int
    evidence: str
    signature: str = ""


@dataclass(frozen=True)
class RecoveryDecided(JobEvent):
    """What the router, the trainer or a supervisor does about a failure (`failure_policy.py`).

    Attributes:
        kind: What failed.
        subject: Whose budget it spent.
        scope: What is restarted. "nothing" also if the budget is spent.
        source: State that training continues from.
        used: Failures since the budget was full, with this one.
        limit: Failures that the budget covers.
        text: The decision as a sentence.
    """

    kind: str
    subject: str
    scope: str
    source: str
    executor: str
    used: int
    limit: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RecoveryCompleted(JobEvent):
    """All roles are at the end of a step again, and the trainer runs the next one again.

    Attributes:
        step: The step in which processes were lost.
        lost: Their slots.
        method: What the first of them executed. "": the driver was lost.
        detected_at: When the trainer knew, in seconds since 1970.
        seconds: From then until all roles were back.
        parts: Part of the recovery -> its seconds.
        back_at_step: The completed step that the roles are at.
    """

    step: int
    lost: tuple[str, ...]
    detected_at: float
    seconds: float
    back_at_step: int
    method: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        took = f"{self.seconds:.1f} s: {parts}" if parts else f"{self.seconds:.1f} s"
        return (
            f"recovered: all roles are at the end of step {self.back_at_step} ({took}); retrying step "
            f"{self.back_at_step + 1}"
        )


@dataclass(frozen=True)
class StepCompleted(JobEvent):
    """The trainer started its first step (0), or completed one. metrics: numbers that it reported with it."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointCommitted(JobEvent):
    """The trainer committed a checkpoint."""

    step: int
    path: str


@dataclass(frozen=True)
class WorkerLeft(JobEvent):
    """A process ended intentionally."""

    slot: str
    pid: int


@dataclass(frozen=True)
class WorkerReplaced(JobEvent):
    """The job supervisor kills a process now, and starts another one in its slot.

    Its end is no failure.
    """

    slot: str
    pid: int


@dataclass(frozen=True)
class RanksChanged(JobEvent):
    """The trainer ends all workers now, and starts another number of them (`trainer.min_ranks`).

    Their end is no failure.

    Attributes:
        sizes: Label of the processes -> number of processes that it starts.
        text: Why, as a sentence.
    """

    sizes: dict[str, int]
    text: str


@dataclass(frozen=True)
class WarningRaised(JobEvent):
    """A finding that is reported but not acted on: a process that blocks a hung job, a straggler, a nearly full disk.

    Attributes:
        slot: The slot it concerns, or a description of something that is not a process.
    """

    slot: str
    text: str


@dataclass(frozen=True)
class StopRequested(JobEvent):
    """A user or the trainer requested a stop of the job."""

    reason: str


@dataclass(frozen=True)
class JobEnded(JobEvent):
    """The outcome of the job, reported by the trainer or decided by the master."""

    succeeded: bool
    reason: str


EVENTS: dict[str, type[JobEvent]] = {cls.__name__: cls for cls in JobEvent.__subclasses__()}


def encode(event: JobEvent) -> dict[str, Any]:
    """Return an event as a JSON-compatible dict."""
    return {"event": type(event).__name__, **asdict(event)}


def decode(data: dict[str, Any]) -> JobEvent:
    """Return the event that `encode` wrote.

    Raises:
        JournalError: If this version does not know the event.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name != "event"
    }
    try:
        return EVENTS[data["event"]](**values)
    except (KeyError, TypeError) as error:
        raise JournalError(
            f"{data} is no event of a job ({error}); read the journal with the version that wrote it"
        ) from None


def role_of_slot(slot: str) -> str:
    """Return the label (roles) of a slot: `actor-3` belongs to `actor`."""
    return slot.rpartition("-")[0] or slot


def slot_matches(slot: str, role: str, rank: int) -> bool:
    """Return whether a slot holds this rank of a role: `actor+rollout-3` holds rank 3 of `rollout`."""
    label, _, number = slot.rpartition("-")
    return number == str(rank) and (label == role or role in label.split("+"))


# -- effects


@dataclass(frozen=True)
class KillProcess:
    """Kill this process reliably, also if it is frozen."""

    slot: str
    name: str
    pid: int
    node: str
    machine: str
    reason: str


@dataclass(frozen=True)
class RecoveryNeeded:
    """Expect a recovery from a failure of this slot, by somebody else: the master only waits for it."""

    slot: str
    reason: str


@dataclass(frozen=True)
class StopTrainer:
    """Request the trainer to stop; it may still commit a checkpoint."""

    reason: str


@dataclass(frozen=True)
class NotifyTrainer:
    """Make the trainer log this text, so that it appears in the output of the driver."""

    text: str


@dataclass(frozen=True)
class ReleaseJob:
    """Kill the remaining processes of the job, then end the master."""

    reason: str


Effect = KillProcess | RecoveryNeeded | StopTrainer | NotifyTrainer | ReleaseJob
