"""End the processes of a group: their `main` first, then the processes.

`MemberGroup` calls this in the process that called the runner. When a process has failed, or after Ctrl-C, the tasks of
the others finish their step. What still runs after half the time is interrupted, and after all of it killed.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.framework.parallel.group_member import on_inbox_thread
from hybridrl.single_controller.cluster import find_actor, get_value

logger = logging.getLogger(__name__)
EXIT_TIMEOUT_S = 20.0  # to flush files at exit before the kill, and again for the kill to take effect
READ_TIMEOUT_S = 5.0  # for a result that is ready


def end_mains(
    running: Mapping[Any, str], members: Mapping[str, Any], because: BaseException, *, timeout_s: float
) -> set[str]:
    """End every `main` that still runs, so that its exit hooks and `finally` blocks run.

    Args:
        running: Reference to the result of `main` -> name of the process.
        members: Name -> Ray actor.
        because: Why the group ends. Gets a note per process that fails meanwhile, or does not end.
        timeout_s: Seconds for all of them.

    Returns:
        Names of the processes whose `main` did not end.
    """
    pending = list(running)
    if pending:
        logger.warning(
            "the group ends because of %s; %s may finish within %g s",
            type(because).__name__,
            ", ".join(running.values()),
            timeout_s,
        )
    for name in running.values():
        on_inbox_thread(members[name].finish).remote(repr(because))
    pending = _wait(pending, timeout_s / 2)
    for reference in pending:
        on_inbox_thread(members[running[reference]].interrupt).remote()
    pending = _wait(pending, timeout_s / 2)
    for reference, name in running.items():
        if reference in pending:
            because.add_note(f"{name} did not end within {timeout_s:g} s and was killed, without its exit hooks")
        else:
            _note_failure(reference, name, because)
    return {running[reference] for reference in pending}


def _wait(references: list, timeout_s: float) -> list:
    """Wait for all; return those that are not ready after `timeout_s`."""
    import ray

    if not references:
        return []
    return ray.wait(references, num_returns=len(references), timeout=timeout_s, fetch_local=False)[1]


def _note_failure(reference: Any, name: str, because: BaseException) -> None:
    try:
        get_value(reference, what=f"the end of {name}", timeout_s=READ_TIMEOUT_S)
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        because.add_note(f"{name} failed while the group ended: {cause!r}")


def allow_exit(members: Sequence[Any]) -> None:
    """Let idle processes exit by themselves, so that their exit handlers run."""
    _wait([member.__ray_terminate__.remote() for member in members], EXIT_TIMEOUT_S)


def kill(members: Mapping[str, Any]) -> None:
    """Kill processes and return when all their names are free again.

    Raises:
        CallTimeout: A process is still registered after `EXIT_TIMEOUT_S`.
    """
    import ray

    for member in members.values():
        ray.kill(member, no_restart=True)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for name in members:
        while find_actor(name) is not None:
            if time.monotonic() > deadline:
                raise CallTimeout(
                    f"{name} was killed and is still registered after {EXIT_TIMEOUT_S:g} s; is its node reachable?"
                )
            time.sleep(0.01)
