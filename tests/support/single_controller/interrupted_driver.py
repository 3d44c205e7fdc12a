"""A driver of its own that attaches to a running cluster, starts a group (detached, the hardest case) and waits until
it is interrupted.

python interrupted_driver.py <address of the cluster> <path of the files that tell that the call has begun>
"""

import signal
import sys

import ray

from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Waiter


def main(address: str, begun: str) -> int:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs, and what they start, ignore it
    ray.init(address=address, log_to_driver=False)
    try:
        with (
            RayResourcePool([2], name_prefix="interrupted", detached=True) as pool,
            RayWorkerGroup(
                pool, RayClassWithInitArgs(Waiter), role="sleeper", name_prefix="interrupted", detached=True
            ) as group,
        ):
            group.sleep_long(begun)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
