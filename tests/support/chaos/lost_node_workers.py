"""Workers on a node that is killed, on a cluster of their own.

    python -m tests.support.chaos.lost_node_workers FOLDER ROOM

ROOM: "room" adds a node to which Ray can move the reservation. Prints JSON lines with what was observed.
"""

import json
import sys
import threading
import time

import numpy as np
import ray
from ray.cluster_utils import Cluster

from hybridrl.errors import ObjectLost, PlacementError, WorkerLost
from hybridrl.master.service.client import MasterClient
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.placement.node_loss import replace_lost_nodes
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker
from tests.support.master.monitored_process import wait_for

OBJECT_STORE_BYTES = 100 * 1024**2


class Holder(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def doze(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def make(self) -> np.ndarray:
        return np.zeros(1_000_000, dtype=np.uint8)

    @register(Dispatch.ONE_TO_ALL)
    def measure(self, *arrays: np.ndarray) -> int:
        return sum(array.nbytes for array in arrays)


def emit(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def lose(cluster, node, watch, group):
    """Remove the node during a call, and print what the driver and the master report, and when."""
    removed = [0.0]

    def remove():
        removed[0] = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)

    threading.Timer(2.0, remove).start()
    try:
        group.doze(120.0)
    except WorkerLost as lost:
        emit(
            source="driver", seconds=time.monotonic() - removed[0], text=str(lost)
        )  # from the master, before Ray detects it
    seen = wait_for(
        watch, lambda seen: seen["workers"]["holder-1"]["state"] == seen["workers"]["holder-0"]["state"] == "lost"
    )
    emit(
        source="master",
        seconds=time.monotonic() - removed[0],
        accounts=[seen["workers"][f"holder-{rank}"]["exit_reason"] for rank in range(2)],
    )


def rebuild(group, arrays):
    start = time.monotonic()
    group.rebuild()
    emit(source="rebuilt", seconds=time.monotonic() - start, nodes=group.processes.nodes)
    start = time.monotonic()
    try:
        group.measure(*arrays)
    except ObjectLost as lost:
        emit(source="object", seconds=time.monotonic() - start, text=str(lost))
    emit(source="new", sizes=group.measure(*group.make.submit()))


if __name__ == "__main__":
    folder, room = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES})
    doomed = cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES)
    ray.init(cluster.address, log_to_driver=False)
    with (
        MasterClient(job="job", run="job-1", journal=folder) as watch,
        RayResourcePool([2]) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Holder), role="holder", name_prefix="job-1") as group,
    ):
        arrays = group.make.submit()
        arrays.fetch(arrays.sizes)
        wait_for(watch, lambda seen: sum(map(bool, seen["beats"].values())) == 3)
        lose(cluster, doomed, watch, group)
        if room == "room":
            cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES)
            rebuild(group, arrays)
        else:
            try:
                replace_lost_nodes(pool.get_placement_groups(), pool.reservations(), detached=False, timeout_s=3.0)
            except PlacementError as error:
                emit(source="placement", text=str(error))
    ray.shutdown()
    cluster.shutdown()
