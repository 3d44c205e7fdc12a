"""A program without a supervisor whose Ray loses its GCS: `python -m tests.support.driver.lost_cluster`.

Prints the ids of all processes of its cluster, then waits to be ended.
"""

import os
import signal
import time

from hybridrl.driver.cluster_watch import ClusterWatch
from hybridrl.driver.ray_cluster import start_ray

if __name__ == "__main__":
    start_ray()
    watch = ClusterWatch()
    while len(found := watch._processes()) < 4:  # GCS, raylet, two agents
        time.sleep(0.1)
    time.sleep(1.0)
    print(*watch._processes(), flush=True)
    [gcs] = [pid for pid, name in watch._essential.items() if "GCS" in name]
    os.kill(gcs, signal.SIGSTOP)
    time.sleep(120)
