"""A training run on a cluster of its own that loses a node.

    python -m tests.support.chaos.lost_node FOLDER MODEL ROLE HOW ROOM [SETTING=VALUE ...]

The driver is on a node without cores. Each pool has a node of its own; the one with ROLE's processes is lost in the
middle of the third step's generation. HOW: "removed" kills its processes; "silent" disconnects a simulated machine
(`machines.py`).
ROOM: "room" adds a spare node to which the lost processes can move. Prints JSON lines with what was observed.
"""

import contextlib
import functools
import json
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from hybridrl import main_ppo
from hybridrl.framework.stage import spec_of
from hybridrl.master.service.client import list_masters
from tests.support.chaos.machines import Switch

OBJECT_STORE_BYTES = 100 * 1024**2
STEP, AFTER_S = 3, 0.05
JOIN_TIMEOUT_S = 60.0
lose_node = lambda node_id: None  # noqa: E731 - set by the program
role: str


def emit(**facts):
    sys.stdout.write(json.dumps({"at": time.time()} | facts) + "\n")
    sys.stdout.flush()


def plant(task, trainer):
    task.use_wrapper(lambda fn: with_loss(fn, trainer))


def with_loss(fn, trainer):
    name = spec_of(fn).name

    @functools.wraps(fn)
    def run(ctx):
        main = sys.modules["__main__"]  # the middleware is loaded by path, as a second copy of this module
        if name == "gen" and trainer.global_steps == STEP and not main.lost.is_set():
            main.lost.set()
            threading.Timer(AFTER_S, main.lose, (trainer,)).start()
        return fn(ctx)

    return run


lost = threading.Event()


def lose(trainer):
    processes = trainer.groups[role].processes
    [node_id] = set(processes.nodes)
    emit(lost=node_id, step=trainer.global_steps, pids=processes.process_ids)
    threading.Thread(target=watch, args=(list_masters()[trainer.job],), daemon=True).start()
    lose_node(node_id)


def watch(master):
    """Print the failures that the master reports, as soon as it does."""
    failures = ()
    while not failures:
        failures = ray.get(master.describe.remote(), timeout=60)["failures"]
        time.sleep(0.05)
    emit(failures=list(failures))


@contextlib.contextmanager
def a_cluster(how, num_nodes):
    """Start a head without cores and `num_nodes` nodes with one; yield a function that loses one of them."""
    with Switch() if how == "silent" else contextlib.nullcontext() as switch:
        size = {"object_store_memory": OBJECT_STORE_BYTES}
        here = {"node_ip_address": switch.host} if switch is not None else {}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **size, **here})
        for _ in range(num_nodes):
            if switch is None:
                cluster.add_node(num_cpus=1, **size)
            else:
                switch.add_machine().start_ray(cluster.address, num_cpus=1, object_store_bytes=OBJECT_STORE_BYTES)
        ray.init(cluster.address, log_to_driver=False)
        end = time.monotonic() + JOIN_TIMEOUT_S
        while len(ray.nodes()) < num_nodes + 1:
            if time.monotonic() > end:
                sys.exit(f"{len(ray.nodes())} of {num_nodes + 1} nodes have joined")
            time.sleep(0.1)

        def remove(node_id):
            cluster.remove_node(
                next(node for node in cluster.worker_nodes if node.node_id == node_id), allow_graceful=False
            )

        def disconnect(node_id):
            address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
            next(machine for machine in switch.machines if machine.address == address).disconnect()

        try:
            yield remove if switch is None else disconnect
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    folder, model, role, how, room, *changes = sys.argv[1:]
    from tests.support.end_to_end.runs import settings

    with a_cluster(how, 2 + (room == "room")) as lose_node:
        start = {"trainer__middleware": f"[{__file__}:plant]", "trainer__backend": "ray", "trainer__master": True}
        code = main_ppo.main([*settings(Path(folder), Path(model), **start), *changes])
        emit(code=code)
    sys.exit(code)
