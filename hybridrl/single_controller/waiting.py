"""Waiting for remote answers: in completion order, with a deadline, and with the address of whoever failed.

Ray is imported by the functions that talk to it, here and in its two neighbours, so that a run in one process needs no Ray at all.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridrl.errors import CallTimeout, WorkerLost

if TYPE_CHECKING:
    from ray.exceptions import RayTaskError


def gather(references: Sequence, *, role: str, method: str, timeout_s: float | None) -> list:
    """Return the values behind the references, one per rank, in rank order.

    The first failure is raised at once, whoever else is still running: a dead process as `WorkerLost(role, rank, method)`, an
    exception in a worker with its own type and a note saying where. Past `timeout_s` seconds: `CallTimeout` naming the silent ranks.
    """
    import ray

    rank_of = {reference: rank for rank, reference in enumerate(references)}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    values: list = [None] * len(references)
    pending = list(rank_of)
    while pending:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=remaining, fetch_local=False)
        if not done:
            ranks = ", ".join(str(rank_of[p]) for p in pending)
            raise CallTimeout(f"{role}.{method}() did not answer within {timeout_s:g} s; still waiting for rank {ranks}")
        for reference in done:
            values[rank_of[reference]] = _value(reference, role=role, rank=rank_of[reference], method=method)
    return values


def _value(reference, *, role: str, rank: int, method: str):
    import ray
    from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise addressed(error, role=role, rank=rank, method=method) from None
    except (RayActorError, WorkerCrashedError) as error:
        raise WorkerLost(role, rank, method, _first_lines(error)) from None


def addressed(error: "RayTaskError", *, role: str, rank: int, method: str) -> BaseException:
    """Return the worker's own exception, with a note of where it happened and with the remote traceback as `remote_traceback`."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    cause.add_note(f"raised in {role}-{rank}, {method}()")
    cause.remote_traceback = str(error)
    return cause


def _first_lines(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())


def wait_ready(reference, *, what: str, timeout_s: float) -> None:
    """Wait until something that Ray makes (a placement group) is there; past the deadline: `CallTimeout` naming it."""
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise CallTimeout(f"{what} was not there within {timeout_s:g} s") from None
