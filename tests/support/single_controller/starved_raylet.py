"""A group on a cluster whose raylet gets no memory: `python -m tests.support.single_controller.starved_raylet`.

Prints the error of a restart, and the seconds that it took.
"""

import os
import resource
import time
from pathlib import Path

import ray

from hybridrl.driver.cluster.ray_cluster import start_local_cluster
from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes import worker_processes
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker
from tests.support.single_controller.only_node import raylet

TIMEOUT_S = 5.0
PAGE = os.sysconf("SC_PAGE_SIZE")


def take_memory(pid: int) -> None:
    """Let no allocation of a process succeed, as where a machine has no memory left."""
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * PAGE
    resource.prlimit(pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))


if __name__ == "__main__":
    start_local_cluster()
    with RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Worker), role="lost") as group:
        worker_processes.RESTART_TIMEOUT_S = TIMEOUT_S
        take_memory(raylet())
        try:
            while True:  # some processes have been started in advance
                start = time.monotonic()
                group.respawn(0)
        except PlacementError as error:
            print(f"{time.monotonic() - start:.1f} s: {error}", flush=True)
    ray.shutdown()
