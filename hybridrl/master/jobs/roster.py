"""`Roster`: the current processes of a role, which any process of a submitted job can look up and call.

    roster = lookup_roster("rollout")
    group = roster.handle.to_group()

The job supervisor (`job_supervisor.py`) keeps one roster per role and replaces it after each restart. A group made from
an earlier roster calls processes that are gone: look the role up again, and compare the epochs.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hybridrl.errors import CallTimeout, ConfigError, PlacementError, WorkerLost
from hybridrl.master.jobs.job_context import current_context
from hybridrl.master.jobs.job_handle import RECOVERY_TIMEOUT_S, GroupHandle
from hybridrl.master.service.client import exit_reason_of
from hybridrl.single_controller import cluster
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.invocation import Invocation
from hybridrl.single_controller.monitoring.process import PROCESS

START_TIMEOUT_S = 60.0  # for processes that do not exist yet
ANSWER_TIMEOUT_S = 120.0  # of the supervisor; Ray may be restarting it
FIRST_POLL_S, MAX_POLL_S = 0.05, 1.0


class RosterState(StrEnum):
    """Whether a role's processes can be called."""

    READY = "ready"
    STARTING = "starting"
    RESTARTING = "restarting"
    NOT_CALLABLE = "not callable"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Roster:
    """The processes of a role after a number of restarts.

    Attributes:
        epoch: Number of restarts of the role. Another epoch has at least one other process.
        handle: The processes, as a group.
        ready_for_s: By rank, for how long the process had been ready when the supervisor answered. The clocks of two
            machines differ, and any of them may be set.
        endpoints: Name -> invocation, of the methods and functions that the processes offer.
    """

    epoch: int
    handle: GroupHandle
    ready_for_s: list[float]
    endpoints: dict[str, Invocation] = field(default_factory=dict)


@dataclass(frozen=True)
class RosterAnswer:
    """The supervisor's answer. hint: what the caller may do, if there is no roster."""

    state: RosterState
    roster: Roster | None = None
    hint: str = ""


def lookup_roster(role: str) -> Roster:
    """Return the current processes of a role. Works in every process of a submitted job.

    Waits while the role is being restarted, and up to 60 s for processes that do not exist yet.

    Raises:
        ConfigError: If the job has no such role, or it runs a program, which cannot be called.
        CallTimeout: If the role did not start or restart in time.
        PlacementError: If the job has ended.
    """
    run = current_context().run
    waits = {RosterState.STARTING: START_TIMEOUT_S, RosterState.RESTARTING: RECOVERY_TIMEOUT_S}
    start, poll_s = time.monotonic(), FIRST_POLL_S
    while True:
        answer: RosterAnswer = _call_supervisor(run, "roster", role)
        if answer.roster is not None:
            return answer.roster
        if answer.state not in waits:
            raise ConfigError(f"role {role!r} is {answer.state}: {answer.hint}")
        if time.monotonic() - start > waits[answer.state]:
            raise CallTimeout(
                f"role {role!r} is still {answer.state} after {waits[answer.state]:g} s; `hybridrl job status {run}` "
                "shows its processes",
                role=role,
            )
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, MAX_POLL_S)


def _call_supervisor(run: str, method: str, *args: Any) -> Any:
    supervisor: Any = cluster.find_actor(cluster.job_supervisor_name(run))
    if supervisor is None:
        raise PlacementError(f"{method}({', '.join(map(repr, args))}) cannot be asked: the job {run} has ended")
    call = getattr(supervisor, method).options(concurrency_group=cluster.ROSTER_GROUP).remote(*args)
    [answer] = wait_all([call], role=cluster.JOB_SUPERVISOR, method=method, timeout_s=ANSWER_TIMEOUT_S)
    return answer


def register_queue(name: str, process: str) -> None:
    """Announce that a process holds the queue of this name.

    Args:
        name: Unique in the job.
        process: `role-rank`. A process that replaces it announces the queue again.

    Raises:
        ConfigError: If another process holds one of this name.
    """
    owner = _call_supervisor(current_context().run, "register_queue", name, process)
    if owner != process:
        raise ConfigError(f"queue {name!r}: {owner} holds it already, and {process} cannot; give it another name")


def queue_owner(name: str) -> str:
    """Return the process that holds a queue, `role-rank`; wait up to 60 s for it.

    Raises:
        CallTimeout: If no process has made the queue in time.
    """
    run, start, poll_s = current_context().run, time.monotonic(), FIRST_POLL_S
    while (owner := _call_supervisor(run, "queue_owner", name)) is None:
        if time.monotonic() - start > START_TIMEOUT_S:
            raise CallTimeout(f"no process has made the queue {name!r} within {START_TIMEOUT_S:g} s")
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, MAX_POLL_S)
    return str(owner)


def loss_account(lost: WorkerLost) -> WorkerLost:
    """Return a loss with the reason that the master recorded, or unchanged if there is none within seconds.

    A loss that this process got from a call has that reason already, unless the master was away.
    """
    if lost.cause in PROCESS.lost_reasons.values():
        return lost
    reason = exit_reason_of(cluster.find_actor(cluster.master_name(current_context().run)), lost.role, lost.rank)
    return WorkerLost(lost.role, lost.rank, lost.method, reason) if reason else lost
