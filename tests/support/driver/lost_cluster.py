"""A program without a supervisor whose Ray loses its GCS: `python -m tests.support.driver.lost_cluster HOW SIGNAL`.

HOW is `program` or `submit`: what starts the cluster. Prints the ids of all processes of its cluster, then waits for a
task that does not end. With HOW `end` the program ends instead, with an error of its own; with HOW `killed` the signal
goes to the program itself. With HOW `exit` the program exits with code 7, and loses its raylet then.
"""

import atexit
import os
import signal
import sys
import time

from hybridrl.driver.cluster.ray_cluster import start_ray
from hybridrl.driver.cluster.watch import ClusterWatch
from hybridrl.master.jobs.submit import connect


def wait_for_ever() -> None:
    import ray

    @ray.remote
    def sleep() -> None:
        time.sleep(1000)

    reference = sleep.remote()
    watch = ClusterWatch()
    while len(found := watch._processes()) < 4:  # GCS, raylet, two agents
        time.sleep(0.1)
    time.sleep(1.0)
    print(*{*found, *watch._others}, flush=True)
    if sys.argv[1] == "exit":
        [raylet] = [pid for pid, name in watch._essential.items() if "raylet" in name]
        atexit.register(os.kill, raylet, signal.Signals[sys.argv[2]])
        sys.exit(7)
    [gcs] = [pid for pid, name in watch._essential.items() if "GCS" in name]
    os.kill(os.getpid() if sys.argv[1] == "killed" else gcs, signal.Signals[sys.argv[2]])
    if sys.argv[1] == "end":
        sys.exit("error: it was found before")
    ray.get(reference)


if __name__ == "__main__":
    if sys.argv[1] == "submit":
        connect(blocking=True)
    else:
        start_ray()
    wait_for_ever()
