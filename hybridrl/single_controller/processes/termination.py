"""Ending worker processes for certain.

`ray.kill` asks a process to end itself, and one that is frozen does not hear.
"""

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hybridrl.single_controller.cluster import find_actor, keeper_name, living, names_in_use
from hybridrl.single_controller.placement.placement_groups import remove_left

logger = logging.getLogger(__name__)
KILL_TIMEOUT_S = 20.0  # for another node to end processes


def kill_processes(places: Iterable[tuple[str, int]], *, gently: bool = False) -> None:
    """Kill the processes of worker hosts that are still there. places: node and process id of each. A node that is gone
    has none.

    gently: with SIGTERM, which they may answer as they like; else with SIGKILL.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node: dict[str, list[int]] = {}
    for node, process_id in places:
        on_node.setdefault(node, []).append(process_id)
    for process_id in on_node.pop(ray.get_runtime_context().get_node_id(), []):
        kill_process(process_id, gently=gently)
    alive = living(on_node) if on_node else set()
    there = ray.remote(num_cpus=0)(_kill_all)
    calls = [
        there.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(ids, gently)
        for node, ids in on_node.items()
        if node in alive
    ]
    done, silent = ray.wait(calls, num_returns=len(calls), timeout=KILL_TIMEOUT_S) if calls else ([], [])
    if silent:
        logger.warning(
            "%d of %d nodes did not say within %g s that their worker processes are gone",
            len(silent),
            len(calls),
            KILL_TIMEOUT_S,
        )


def _kill_all(process_ids: Sequence[int], gently: bool) -> None:
    for process_id in process_ids:
        kill_process(process_id, gently=gently)


def kill_process(process_id: int, *, gently: bool = False) -> None:
    """Kill a process of a worker host on this node; one that is gone, or another program's by now, is left alone."""
    command = Path(f"/proc/{process_id}/cmdline")
    try:
        if b"WorkerHost" in command.read_bytes():
            os.kill(process_id, signal.SIGTERM if gently else signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


def end_run(run: str, *, but: str = "", within_s: float = 0.0) -> None:
    """End every process of a run on the connected cluster, but the one of that name, and give back what the run has
    reserved.

    A keeper is left to end itself: it still has to tell who submitted the job how it ended. within_s: see `end_named`.
    """
    end_named(set(names_in_use(f"{run}/")) - {but, keeper_name(run)}, within_s=within_s)
    remove_left(run)


def end_named(names: Collection[str], *, within_s: float) -> None:
    """End the actors of these names, and wait at most so long until the names are free."""
    until = time.monotonic() + within_s
    while there := [actor for name in names if (actor := find_actor(name)) is not None]:
        kill_actors(there)
        if time.monotonic() > until:
            return
        time.sleep(0.05)


def kill_actors(hosts: Sequence) -> None:
    import ray

    for host in hosts:
        ray.kill(host, no_restart=True)
