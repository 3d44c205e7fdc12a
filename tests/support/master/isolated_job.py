"""Runs a job whose supervisor and other processes have machines of their own, on a cluster with such machines.

Prints what the supervisor and the processes were given.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import ray

from hybridrl.master.jobs.builder import DLJobBuilder
from tests.support.master.elastic_program import writes_resources


def taken(name):
    return ray.cluster_resources()[name] - ray.available_resources().get(name, 0)


def main():
    resources = {"MR": 999, "WR": 999}
    ray.init(
        address="local", num_cpus=4, resources=resources, include_dashboard=False, object_store_memory=80 * 1024**2
    )
    most = {"MR": 0.0, "WR": 0.0}
    ended = threading.Event()

    def watch():
        while not ended.is_set():
            most.update({name: max(most[name], taken(name)) for name in most})
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        builder = DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU").config({"out": folder})
        builder.train(writes_resources).nnodes(2).nproc_per_node(2).resource(cpu=0.25)
        code = builder.build().submit("isolated", master_cpu=1, master_memory=128)
        ended.set()
        print(code, {name: round(amount) for name, amount in most.items()}, sep=" | ", end=" | ")
        print(*[path.read_text() for path in sorted(Path(folder).iterdir())], sep=" | ", flush=True)
    ray.shutdown()
    sys.exit(0)


if __name__ == "__main__":
    main()
