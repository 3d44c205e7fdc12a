"""Prints the placement of reservations on a cluster of its own: three machines with 4, 2 and 2 cores, in the zones a, b
and b.
"""

import time

import ray
from ray.cluster_utils import Cluster

from hybridrl.errors import PlacementError
from hybridrl.master.jobs.builder import DLJobBuilder
from hybridrl.master.plan.packing import pack_plan
from hybridrl.single_controller.launch import make_pools
from hybridrl.single_controller.placement.placement_groups import cluster_nodes, nodes_of

CORES, FREE_TIMEOUT_S = 8, 30.0
ENTRY = "some.module:Class"


def place(name, builder):
    built = builder.build()
    pools = make_pools(pack_plan(built.plan("job"), built.spec, cluster_nodes()))
    try:
        where = {pool: "".join(SIGN[node] for node in nodes_of(pools[pool].get_placement_groups())) for pool in pools}
        print(name, *(f"{pool}={''.join(sorted(signs))}" for pool, signs in where.items()), flush=True)
    except PlacementError as error:
        print(name, error, flush=True)
    finally:
        for pool in pools.values():
            pool.release()
        until = time.monotonic() + FREE_TIMEOUT_S  # Ray frees lazily, and preferences need free cores
        while ray.available_resources().get("CPU", 0) < CORES and time.monotonic() < until:
            time.sleep(0.1)


cluster = Cluster()
for cpus, zone in ((4, "a"), (2, "b"), (2, "b")):
    cluster.add_node(num_cpus=cpus, labels={"zone": zone}, object_store_memory=80 * 1024**2)
ray.init(cluster.address, log_to_driver=False)
nodes = sorted(ray.nodes(), key=lambda node: -node["Resources"]["CPU"])
SIGN = {node["NodeID"]: sign for node, sign in zip(nodes, "ABC", strict=True)}


def job():
    return DLJobBuilder().device_type("CPU")


place("strict_spread", job().workload("a", ENTRY).total(3).spread(strict=True))
place("too_many", job().workload("a", ENTRY).total(4).spread(strict=True))
place("spread", job().workload("a", ENTRY).total(4).spread())
place(
    "labels",
    job()
    .workload("a", ENTRY)
    .node_labels({"zone": "!b"})
    .workload("b", ENTRY)
    .total(2)
    .per_node(2)
    .node_labels({"zone": "b"}),
)
place(
    "apart", job().workload("a", ENTRY).total(4).per_node(4).workload("b", ENTRY).total(2).spread().anti_affinity("a")
)
place("strict_pack", job().workload("a", ENTRY).total(4).pack(strict=True))
for name, heavy in (("heavy", ("a", "b")), ("other", ("c", "b"))):
    three = job()
    for role in "abc":
        three.workload(role, ENTRY).total(2).per_node(2)
    place(name, three.feeds("a", "b").feeds(*heavy, weight=9).weights("b", "c"))
ray.shutdown()
cluster.shutdown()
