"""A pool on a cluster of one node, whose raylet is killed: `python -m tests.support.single_controller.only_node`.

Prints the node's room for objects beside the memory that was free, then the error of `replace_lost_nodes` and the
seconds that it took.
"""

import os
import signal
import time
from pathlib import Path

import ray

from hybridrl.driver.cluster.ray_cluster import start_local_cluster
from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.system.child_guard import children_of


def raylet() -> int:
    for pid in children_of(os.getpid()):
        with open(f"/proc/{pid}/comm") as file:
            if file.read().strip() == "raylet":
                return pid
    raise LookupError("no raylet below this process")


if __name__ == "__main__":
    [free] = [line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line[:12] == "MemAvailable"]
    start_local_cluster()
    print(f"{int(ray.cluster_resources()['object_store_memory'])} of {int(free) * 1024} bytes", flush=True)
    pool = RayResourcePool([1], name_prefix="only")
    pool.get_placement_groups()
    os.kill(raylet(), signal.SIGKILL)
    time.sleep(1.0)
    start = time.monotonic()
    try:
        pool.replace_lost_nodes()
    except PlacementError as error:
        print(f"{time.monotonic() - start:.1f} s: {error}", flush=True)
    ray.shutdown()
