"""What can happen to a job (events), and what can be done about it (effects). The journal holds the events, as JSON."""

from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from hybridrl.errors import JournalError

TRAINER = "trainer"  # the slot of the driver


class Level(IntEnum):
    CALL = 0
    REPLICA = 1
    ROLE = 2
    SUBGRAPH = 3
    TRAINER = 4
    JOB = 5
    ABORT = 6


class Kind(StrEnum):
    """What a failure is. Its value is what the journal and the report say."""

    CALL = "call"  # a call that did not answer before its deadline; its process is there
    DIED = "died"
    FROZEN = "frozen"  # its process is there and does nothing; it is ended, and then lost
    NODE = "node"
    EXCEPTION = "exception"  # raised by the program, in a worker or in the trainer


# -- events, as the journal holds them


@dataclass(frozen=True)
class Begun:
    """The first event. roles: label of the processes (roles joined by "+") -> number of them.

    replicas: labels whose processes do not talk to each other. levels: those that somebody in this job can carry out.
    limits_itself: whoever that is counts failures, and ends the job after too many.
    program: process id, on the trainer's node, of who starts the trainer again; 0 where nobody does.
    """

    job: str
    run: str
    roles: dict[str, int] = field(default_factory=dict)
    replicas: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    limits_itself: bool = False
    program: int = 0


@dataclass(frozen=True)
class Joined:
    """A process spoke for the first time, to this master or to the one before. slot: `{label}-{rank}`, or the
    trainer's.

    rank, group_size: its place among the processes of its label.
    """

    slot: str
    name: str
    pid: int
    node: str
    machine: str = ""
    group_size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Silenced:
    slot: str
    pid: int
    evidence: str


@dataclass(frozen=True)
class Spoke:
    """A process that was silent was heard again."""

    slot: str
    pid: int


@dataclass(frozen=True)
class Failed:
    """signature: of an exception, its type and message; with it, the same one at the same step is recognised."""

    kind: str
    slot: str
    pid: int
    evidence: str
    signature: str = ""


@dataclass(frozen=True)
class Stepped:
    """The trainer began its first step (0), or finished one."""

    step: int


@dataclass(frozen=True)
class Committed:
    step: int
    path: str


@dataclass(frozen=True)
class Left:
    """A process ended as it should."""

    slot: str
    pid: int


@dataclass(frozen=True)
class Noticed:
    """Something that is told and not acted on: who holds up a job that hangs, a process that is slow, a disk that is
    nearly full.

    slot: whom it is about; what is no process is said in words.
    """

    slot: str
    text: str


@dataclass(frozen=True)
class StopAsked:
    reason: str


@dataclass(frozen=True)
class Ended:
    """The trainer's last word, or the master's about it."""

    succeeded: bool
    reason: str


Event = Begun | Joined | Silenced | Spoke | Failed | Stepped | Committed | Left | Noticed | StopAsked | Ended
EVENTS = {
    cls.__name__: cls
    for cls in (Begun, Joined, Silenced, Spoke, Failed, Stepped, Committed, Left, Noticed, StopAsked, Ended)
}


def encode(event: Event) -> dict[str, Any]:
    """Return an event as JSON has it."""
    return {"event": type(event).__name__, **asdict(event)}


def decode(data: dict[str, Any]) -> Event:
    """Return the event that `encode` wrote. Raises JournalError for one that this version does not know."""
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name != "event"
    }
    try:
        return EVENTS[data["event"]](**values)
    except (KeyError, TypeError) as error:
        raise JournalError(
            f"{data} is no event of a job ({error}); read the journal with the version that wrote it"
        ) from None


def label_of(slot: str) -> str:
    """Return the roles of a slot's processes: `actor-3` is of `actor`."""
    return slot.rpartition("-")[0] or slot


def holds(slot: str, role: str, rank: int) -> bool:
    """Whether a slot's process is that of a role's rank: `actor+rollout-3` is that of `rollout` and 3."""
    label, _, number = slot.rpartition("-")
    return number == str(rank) and (label == role or role in label.split("+"))


# -- effects


@dataclass(frozen=True)
class EndProcess:
    """End this process for certain, also if it is frozen."""

    slot: str
    name: str
    pid: int
    node: str
    machine: str
    reason: str


@dataclass(frozen=True)
class Recover:
    """Have the level carried out. slots: whose processes are made anew."""

    level: int
    slots: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class StopTrainer:
    reason: str


@dataclass(frozen=True)
class TellTrainer:
    """Have the trainer say it, where whoever started the job sees it."""

    text: str


@dataclass(frozen=True)
class EndJob:
    """End whatever process of the job is left, then the master."""

    reason: str


Effect = EndProcess | Recover | StopTrainer | TellTrainer | EndJob
