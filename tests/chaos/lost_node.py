"""A training run on a cluster of its own, of which a node is removed.

    python -m tests.chaos.lost_node FOLDER MODEL ROLE ROOM [SETTING=VALUE ...]

The driver is on a node without cores. Each pool has a node of its own; the one with ROLE's processes is removed in the middle of the third
step's generation. ROOM: "room" for a node more, to which Ray can move what was on it. Prints a line of JSON for what was seen.
"""

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
from hybridrl.master.client import masters

OBJECT_STORE_BYTES = 100 * 1024**2
STEP, AFTER_S = 3, 0.05
cluster: Cluster
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
        if name == "gen" and trainer.global_steps == STEP and not main.removed.is_set():
            main.removed.set()
            threading.Timer(AFTER_S, main.remove, (trainer,)).start()
        return fn(ctx)

    return run


removed = threading.Event()


def remove(trainer):
    processes = trainer.groups[role].processes
    [node_id] = set(processes.nodes)
    node = next(node for node in cluster.worker_nodes if node.node_id == node_id)
    say(removed=node_id, step=trainer.global_steps, pids=processes.process_ids)
    threading.Thread(target=watch, args=(masters()[trainer.job],), daemon=True).start()
    cluster.remove_node(node, allow_graceful=False)


def watch(master):
    """Say what the master knows as soon as it does."""
    known = ()
    while len(known) < 1:
        known = ray.get(master.describe.remote(), timeout=60)["failures"]
        time.sleep(0.05)
    say(failures=list(known))


if __name__ == "__main__":
    folder, model, role, room, *changes = sys.argv[1:]
    from tests.end_to_end.runs import settings

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES})
    for _ in range(2 + (room == "room")):
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    ray.init(cluster.address, log_to_driver=False)
    start = {"trainer__middleware": f"[{__file__}:plant]", "trainer__backend": "ray", "trainer__master": True}
    code = main_ppo.main([*settings(Path(folder), Path(model), **start), *changes])
    say(code=code)
    ray.shutdown()
    cluster.shutdown()
    sys.exit(code)
