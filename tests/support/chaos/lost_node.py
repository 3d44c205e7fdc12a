"""A training run on a cluster of its own, of which a node is lost.

    python -m tests.support.chaos.lost_node FOLDER MODEL ROLE HOW ROOM [SETTING=VALUE ...]

The driver is on a node without cores. Each pool has a node of its own; the one with ROLE's processes is lost in the
middle of the third step's generation. HOW: "removed", its processes are killed; "silent", it is a machine of its own
(`machines.py`) whose cable is pulled. ROOM: "room" for a node more, to which what was on it can move. Prints a line of
JSON for what was seen.
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
from hybridrl.master.service.client import masters
from tests.support.chaos.machines import Switch

OBJECT_STORE_BYTES = 100 * 1024**2
STEP, AFTER_S = 3, 0.05
JOINS_WITHIN_S = 60.0
lose_node = lambda node_id: None  # noqa: E731 - set by the program
role: str


def say(**facts):
    sys.stdout.write(json.dumps({"at": time.time()} | facts) + "\n")
    sys.stdout.flush()


def plant(task, trainer):
    task.use_wrapper(lambda fn: with_loss(fn, trainer))


def with_loss(fn, trainer):
    name = spec_of(fn).name

    @functools.wraps(fn)
    def run(ctx):
        main = sys.modules["__main__"]  # this module is another one there, made by its path
        if name == "gen" and trainer.global_steps == STEP and not main.lost.is_set():
            main.lost.set()
            threading.Timer(AFTER_S, main.lose, (trainer,)).start()
        return fn(ctx)

    return run


lost = threading.Event()


def lose(trainer):
    processes = trainer.groups[role].processes
    [node_id] = set(processes.nodes)
    say(lost=node_id, step=trainer.global_steps, pids=processes.process_ids)
    threading.Thread(target=watch, args=(masters()[trainer.job],), daemon=True).start()
    lose_node(node_id)


def watch(master):
    """Say what the master knows as soon as it does."""
    known = ()
    while len(known) < 1:
        known = ray.get(master.describe.remote(), timeout=60)["failures"]
        time.sleep(0.05)
    say(failures=list(known))


@contextlib.contextmanager
def a_cluster(how, num_nodes):
    """A head without cores and so many nodes with one; yields how to lose one of them."""
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
        end = time.monotonic() + JOINS_WITHIN_S
        while len(ray.nodes()) < num_nodes + 1:
            if time.monotonic() > end:
                sys.exit(f"{len(ray.nodes())} of {num_nodes + 1} nodes are there")
            time.sleep(0.1)

        def remove(node_id):
            cluster.remove_node(
                next(node for node in cluster.worker_nodes if node.node_id == node_id), allow_graceful=False
            )

        def silence(node_id):
            address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
            next(machine for machine in switch.machines if machine.address == address).fall_silent()

        try:
            yield remove if switch is None else silence
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    folder, model, role, how, room, *changes = sys.argv[1:]
    from tests.support.end_to_end.runs import settings

    with a_cluster(how, 2 + (room == "room")) as lose_node:
        start = {"trainer__middleware": f"[{__file__}:plant]", "trainer__backend": "ray", "trainer__master": True}
        code = main_ppo.main([*settings(Path(folder), Path(model), **start), *changes])
        say(code=code)
    sys.exit(code)
