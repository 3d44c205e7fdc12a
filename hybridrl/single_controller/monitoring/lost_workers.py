"""Workers that the job's master reported as lost to this process.

The master detects lost workers before Ray does, much earlier when a machine disappears. `wait_all` looks here, so that
pending calls to such a worker fail immediately.
"""

from typing import Any

from hybridrl.single_controller.monitoring.process_state import PROCESS


def mark_lost(actor: str, reason: str) -> None:
    """Record that the worker with this actor id (hex) is lost. Its replacement has another id."""
    PROCESS.lost_reasons[actor] = reason


def lost_reason(reference: Any) -> str | None:
    """Return how the worker that computes this Ray reference was lost, or None."""
    reasons = PROCESS.lost_reasons
    return reasons.get(reference.task_id().actor_id().hex()) if reasons else None
