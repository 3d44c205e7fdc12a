"""Reattach to the worker processes of a previous driver of the same run.

The new driver finds them by actor name and gives them the new fencing token. Called by `RayWorkerGroup` at its start.
"""

import logging
import re
import time
from typing import Any

from hybridrl.errors import CallTimeout, PlacementError, WorkerLost
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.cluster import actor_names, find_actor, get_value, master_name, slot_from_name
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.host_start import ProcessRecipe, find_host
from hybridrl.single_controller.processes.termination import kill_named
from hybridrl.single_controller.processes.worker_processes import WorkerProcesses

logger = logging.getLogger(__name__)
REPLY_TIMEOUT_S = 120.0  # includes the call that a process is still executing; after this it is replaced
POLL_PERIOD_S = 1.0  # as heartbeats
MASTER_TIMEOUT_S = 10.0  # it answers in milliseconds; a frozen one is restarted meanwhile
KILL_TIMEOUT_S = 20.0


def reattach_processes(pool: RayResourcePool, recipe: ProcessRecipe) -> WorkerProcesses | None:
    """Return the processes that a previous driver started on this pool with this recipe.

    From then on the processes refuse queued calls of that driver.

    Returns:
        None if a process is missing, was not marked ready, or does not answer, for instance because it waits in a
        collective for a missing one. The remaining processes of the group are then killed.
    """
    found = find_worker_names(recipe.run, recipe.label)
    try:
        if sorted(found) != list(range(pool.world_size)):
            raise PlacementError(f"{len(found)} of {pool.world_size} processes still run")
        names = [found[rank] for rank in range(pool.world_size)]
        hosts = [find_host(name) for name in names]
        _wait_idle(hosts, names, run=recipe.run)
        processes = WorkerProcesses.attach(hosts, names, timeout_s=REPLY_TIMEOUT_S)
        if unready := recipe.workers.keys() - processes.ready:
            raise PlacementError(f"{', '.join(sorted(unready))} was not ready when its driver was lost")
        processes.fencing_token += 1
        accepted = [host.accept_driver.remote(processes.fencing_token) for host in hosts]
        wait_all(accepted, role=recipe.label, method="accept_driver", timeout_s=REPLY_TIMEOUT_S)
    except (WorkerLost, CallTimeout, PlacementError) as error:
        logger.info("cannot reattach to %s (%s); starting new processes", recipe.label, error)
        kill_named(found.values(), timeout_s=KILL_TIMEOUT_S)
        return None
    recipe.incarnations = {rank: _incarnation(name) for rank, name in enumerate(names)}
    processes.pool, processes.recipe = pool, recipe
    pool.acquire_share(recipe.group_name, recipe.share)
    return processes


def _wait_idle(hosts: list[Any], names: list[str], *, run: str) -> None:
    """Wait until no process is executing a call.

    A process that does not answer is busy; the master has the method from its last heartbeat.

    Raises:
        PlacementError: on timeout, or at once if a collective call reached only some ranks, because it cannot finish.
    """
    import ray

    replies = [host.describe.remote() for host in hosts]
    until = time.monotonic() + REPLY_TIMEOUT_S
    while time.monotonic() < until:
        done, busy = ray.wait(replies, num_returns=len(replies), timeout=POLL_PERIOD_S)
        if not busy or (master := find_actor(master_name(run))) is None:
            return
        idle = wait_all(done, role=run, method="describe", timeout_s=REPLY_TIMEOUT_S)
        calls_started = [entry["calls_started"] for entry in idle]
        try:
            description = get_value(master.describe.remote(), what="the master's answer", timeout_s=MASTER_TIMEOUT_S)
            beats = description["beats"]
        except (ray.exceptions.RayError, CallTimeout):  # the master is being restarted
            continue
        for name in (names[replies.index(reply)] for reply in busy):
            beat = beats.get(slot_from_name(name), {})
            method = beat.get("doing")
            if method and any(started.get(method, 0) < beat.get("call_number", 0) for started in calls_started):
                raise PlacementError(f"{name} executes {method}, which was not called on all ranks")
    raise PlacementError(f"{len(busy)} of {len(hosts)} processes did not answer within {REPLY_TIMEOUT_S:g} s")


def find_worker_names(run: str, label: str) -> dict[int, str]:
    """Return the actor names of a group's processes by rank, of each rank the newest incarnation."""
    names, pattern = actor_names(f"{run}/"), re.compile(rf"{re.escape(run)}/{re.escape(label)}-(\d+)(\.\d+)?")
    newest: dict[int, str] = {}
    for match in filter(None, map(pattern.fullmatch, sorted(names, key=_incarnation))):
        newest[int(match[1])] = match[0]
    return newest


def _incarnation(name: str) -> int:
    number = name.rpartition("/")[2].partition(".")[2]
    return int(number) if number.isdigit() else 1
