"""Going on with the processes that an earlier driver of the same run has left: found by their names, told who commands
now.
"""

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from hybridrl.errors import CallTimeout, PlacementError, WorkerLost
from hybridrl.single_controller.awaiting import gather
from hybridrl.single_controller.cluster import find_actor, master_name, names_in_use, slot_of
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.termination import end_named
from hybridrl.single_controller.processes.worker_processes import (
    StartAgain,
    WorkerProcesses,
    actor_options,
    environment_of,
    named_host,
)
from hybridrl.single_controller.worker_group import ClassWithInitArgs

logger = logging.getLogger(__name__)
ANSWER_WITHIN_S = 120.0  # behind the call that a process is still busy with; who takes longer is started anew
LOOK_EVERY_S = 1.0  # as heartbeats come
GONE_WITHIN_S = 20.0


def take_up_processes(
    pool: RayResourcePool,
    recipes: Mapping[str, ClassWithInitArgs],
    *,
    label: str,
    name_prefix: str,
    share: float,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
) -> WorkerProcesses | None:
    """Return the processes that an earlier driver started with these arguments (of `WorkerProcesses.start`).

    Calls of that driver that they have not begun are refused from now on. None when a process is missing or was not
    ready, or does not answer because it waits for one that is missing: what is left of the group is ended then.
    """
    living = names_of_living(name_prefix, label)
    try:
        if sorted(living) != list(range(pool.world_size)):
            raise PlacementError(f"of {pool.world_size} processes, {len(living)} are left")
        names = [living[rank] for rank in range(pool.world_size)]
        hosts = [named_host(name) for name in names]
        _wait_idle(hosts, names, run=name_prefix)
        processes = WorkerProcesses.attach(hosts, names, timeout_s=ANSWER_WITHIN_S)
        if unready := recipes.keys() - processes.ready:
            raise PlacementError(f"{', '.join(sorted(unready))} was not ready when its driver was lost")
        processes.life += 1
        gather(
            [host.obey.remote(processes.life) for host in hosts], role=label, method="obey", timeout_s=ANSWER_WITHIN_S
        )
    except (WorkerLost, CallTimeout, PlacementError) as error:
        logger.info("%s is started anew: %s", label, error)
        end_named(living.values(), within_s=GONE_WITHIN_S)
        return None
    again = actor_options(pool, recipes, share=share, options=options, environment=environment)
    lives = {rank: _life(name) for rank, name in enumerate(names)}
    processes.pool, processes.start_again = (
        pool,
        StartAgain(dict(recipes), again, environment_of(name_prefix, environment), lives),
    )
    pool.take(f"{name_prefix}/{label}", share)
    return processes


def _wait_idle(hosts: list, names: list[str], *, run: str) -> None:
    """Return when all have done what they were called for. Raises PlacementError where that takes too long, and at once
    for a call of which only some were told: it never ends.

    Those who do not answer are busy; what with, their last heartbeat told the master.
    """
    import ray

    answers = [host.describe.remote() for host in hosts]
    until = time.monotonic() + ANSWER_WITHIN_S
    while time.monotonic() < until:
        done, busy = ray.wait(answers, num_returns=len(answers), timeout=LOOK_EVERY_S)
        if not busy or (master := find_actor(master_name(run))) is None:
            return
        turns = [entry["turns"] for entry in gather(done, role=run, method="describe", timeout_s=ANSWER_WITHIN_S)]
        try:
            beats = ray.get(master.describe.remote(), timeout=ANSWER_WITHIN_S)["beats"]
        except ray.exceptions.RayError:  # it is on its way back
            continue
        for name in (names[answers.index(answer)] for answer in busy):
            beat = beats.get(slot_of(name), {})
            if any(own.get(beat.get("doing"), 0) < beat.get("turn", 0) for own in turns if beat.get("doing")):
                raise PlacementError(f"{name} is in {beat['doing']}, of which others were not told")
    raise PlacementError(f"{len(busy)} of {len(hosts)} did not answer within {ANSWER_WITHIN_S:g} s")


def names_of_living(run: str, label: str) -> dict[int, str]:
    """Return the newest life of every process of a group that Ray knows, by rank."""
    names, pattern = names_in_use(f"{run}/"), re.compile(rf"{re.escape(run)}/{re.escape(label)}-(\d+)(\.\d+)?")
    newest: dict[int, str] = {}
    for match in filter(None, map(pattern.fullmatch, sorted(names, key=_life))):
        newest[int(match[1])] = match[0]
    return newest


def _life(name: str) -> int:
    number = name.rpartition("/")[2].partition(".")[2]
    return int(number) if number.isdigit() else 1
