"""What the job's master told this process about workers that are gone. It knows before Ray does, long before of a
machine that went without a word, and calls that wait for such a worker end at once.
"""

from typing import Any

_ACCOUNTS: dict[
    str, str
] = {}  # Ray's id of the worker's actor (hex) -> how it was lost; no worker comes back with the same id


def declare(actor: str, account: str) -> None:
    """Note that a worker is gone."""
    _ACCOUNTS[actor] = account


def account_of(answer: Any) -> str | None:
    """Return how the worker was lost that was to give this answer, a reference of Ray's; None where nothing is known of
    a loss.
    """
    return _ACCOUNTS.get(answer.task_id().actor_id().hex()) if _ACCOUNTS else None
