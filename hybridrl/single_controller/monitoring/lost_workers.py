"""Workers that the job's master reported as lost to this process.

The master detects lost workers before Ray does, much earlier when a machine disappears. `wait_all` looks here, so that
pending calls to such a worker fail immediately.
"""

from typing import Any

# Ray's actor id (hex) -> how the worker was lost. A replacement worker has another id.
_LOST_REASONS: dict[str, str] = {}


def mark_lost(actor: str, reason: str) -> None:
    """Record that the worker with this actor id (hex) is lost."""
    _LOST_REASONS[actor] = reason


def lost_reason(reference: Any) -> str | None:
    """Return how the worker that computes this Ray reference was lost, or None."""
    return _LOST_REASONS.get(reference.task_id().actor_id().hex()) if _LOST_REASONS else None
