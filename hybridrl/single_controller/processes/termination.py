"""Kill worker processes reliably, with their actors and reservations.

`ray.kill` needs the process to cooperate, which a frozen one does not; so the process is killed by its id too. Called
by the driver, the master and the job supervisor.
"""

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from hybridrl.single_controller.cluster import actor_names, alive_nodes, find_actor, job_supervisor_name
from hybridrl.single_controller.placement.placement_groups import remove_leftover_groups
from hybridrl.single_controller.processes.on_node import start_task
from hybridrl.system.process_stat import read_process_stat

logger = logging.getLogger(__name__)
END_TIMEOUT_S = 1.0  # for a process that Ray ends
KILL_TIMEOUT_S = 20.0  # for another node to kill its processes

# Ray names processes so: after the actor's class, and before its constructor runs.
PROCESS_NAMES = (b"WorkerHost", b"JobSupervisorActor", b"JobMaster", b"SnapshotStore", b"ray::IDLE")


def kill_processes(processes: Iterable[tuple[str, int]], *, graceful: bool = False) -> None:
    """Kill worker processes on any node; skip nodes that are gone.

    Args:
        processes: node id and process id of each.
        graceful: with SIGTERM, which a process may handle; otherwise with SIGKILL.
    """
    import ray

    on_node: dict[str, list[int]] = {}
    for node, process_id in processes:
        on_node.setdefault(node, []).append(process_id)
    for process_id in on_node.pop(ray.get_runtime_context().get_node_id(), []):
        kill_process(process_id, graceful=graceful)
    alive = alive_nodes(on_node) if on_node else set()
    calls = [start_task(node, _kill_all, ids, graceful) for node, ids in on_node.items() if node in alive]
    _, silent = ray.wait(calls, num_returns=len(calls), timeout=KILL_TIMEOUT_S) if calls else ([], [])
    if silent:
        logger.warning(
            "%d of %d nodes did not confirm within %g s that their worker processes were killed; continuing",
            len(silent),
            len(calls),
            KILL_TIMEOUT_S,
        )


def _kill_all(process_ids: Sequence[int], graceful: bool) -> None:
    for process_id in process_ids:
        kill_process(process_id, graceful=graceful)


def kill_process(process_id: int, *, graceful: bool = False) -> None:
    """Kill a process of a job on this node; do nothing if it is gone or its id now belongs to another program."""
    try:
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()
        if any(name in command for name in PROCESS_NAMES):
            os.kill(process_id, signal.SIGTERM if graceful else signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


def end_actor(actor: Any, process: tuple[str, int]) -> None:
    """Kill an actor, and also its process if that is frozen.

    A process that is killed before Ray has ended it is an error in Ray's messages to the user.

    Args:
        actor: Its handle.
        process: Node id and process id.
    """
    kill_actors([actor])
    until = time.monotonic() + END_TIMEOUT_S
    while read_process_stat(process[1]).state and time.monotonic() < until:  # on another node: of another process
        time.sleep(0.02)
    kill_processes([process])


def kill_run(run: str, *, exclude: str = "", timeout_s: float = 0.0) -> None:
    """Kill all actors of a run on the connected cluster and release its reservations.

    The job supervisor ends by itself, because it still has to report the job's outcome to its submitter.

    Args:
        exclude: name of an actor to keep.
        timeout_s: see `kill_named`.
    """
    kill_named(set(actor_names(f"{run}/")) - {exclude, job_supervisor_name(run)}, timeout_s=timeout_s)
    remove_leftover_groups(run)


def kill_named(names: Collection[str], *, timeout_s: float) -> None:
    """Kill the actors of these names and wait at most `timeout_s` seconds until the names are free."""
    until = time.monotonic() + timeout_s
    while actors := [actor for name in names if (actor := find_actor(name)) is not None]:
        kill_actors(actors)
        if time.monotonic() > until:
            return
        time.sleep(0.05)


def kill_actors(actors: Sequence[Any]) -> None:
    """Kill these actors at once; Ray starts none of them again."""
    import ray

    for actor in actors:
        ray.kill(actor, no_restart=True)
