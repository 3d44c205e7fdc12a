"""Workers that the job's master reported as lost to this process.

The master detects lost workers before Ray does, much earlier when a machine disappears, and knows how they ended.
`wait_all` looks here, so that pending calls to such a worker fail immediately, with the master's reason.
"""

import time
from typing import Any

from hybridrl.single_controller.monitoring.process_state import PROCESS

REPORT_TIMEOUT_S = 3.0  # Ray may notice a death some milliseconds before the master has read the exit status


def mark_lost(actor: str, reason: str) -> None:
    """Record that the worker with this actor id (hex) is lost.

    Its replacement has another id.
    """
    PROCESS.lost_reasons[actor] = reason


def expect_reports() -> None:
    """Make `await_report` wait: the master reports every lost worker of this process's job to it."""
    PROCESS.expects_reports = True


def reported_reason(actor: str) -> str | None:
    """Return how the worker with this actor id (hex) was lost, or None if the master has not reported it."""
    return PROCESS.lost_reasons.get(actor)


def is_reported(reason: str) -> bool:
    """Return whether the master has reported a loss for this reason."""
    return reason in PROCESS.lost_reasons.values()


def await_report(actor: str) -> str | None:
    """Return the same, after waiting a moment for the report if this process gets reports."""
    until = time.monotonic() + (REPORT_TIMEOUT_S if PROCESS.expects_reports else 0.0)
    while (reason := PROCESS.lost_reasons.get(actor)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return reason


def lost_reason(reference: Any) -> str | None:
    """Return how the worker that computes this Ray reference was lost, or None."""
    reasons = PROCESS.lost_reasons
    return reasons.get(reference.task_id().actor_id().hex()) if reasons else None
