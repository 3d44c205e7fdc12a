"""Limit of concurrent tasks of one kind in an event loop: agents, tools, environments."""

import asyncio
from collections.abc import Hashable


def slots(limit: int, *, of: Hashable) -> asyncio.Semaphore:
    """Return the running event loop's semaphore for a kind of work.

    The loop keeps it. A semaphore refers to its loop once a task has waited for it, so a table elsewhere would keep
    ended loops.

    Args:
        limit: The same for every task of a kind.
        of: Kind of work.
    """
    kinds = vars(asyncio.get_running_loop()).setdefault("_slots_of_hybridrl", {})
    return kinds.setdefault(of, asyncio.Semaphore(limit))
