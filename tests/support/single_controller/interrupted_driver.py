"""A driver that connects to a running cluster, starts a detached group, the hardest case, and waits for Ctrl-C.

python interrupted_driver.py ADDRESS PATH        # a rank creates the file PATH.RANK when its call starts
"""

import signal
import sys

import ray

from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Waiter


def main(address: str, path: str) -> int:
    # Background jobs of a shell, and their children, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ray.init(address=address, log_to_driver=False)
    try:
        with (
            RayResourcePool([2], name_prefix="interrupted", detached=True) as pool,
            RayWorkerGroup(
                pool, RayClassWithInitArgs(Waiter), role="sleeper", name_prefix="interrupted", detached=True
            ) as group,
        ):
            group.sleep_long(path)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
