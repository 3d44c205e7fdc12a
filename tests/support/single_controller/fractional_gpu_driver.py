"""Print the devices that workers see: two groups that share the slots of one pool, and one group on its own pool.

For the first group, Ray sets the visible devices. For the second, Ray is told not to, as on some clusters.
"""

import ray

from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker


class Viewer(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def devices(self) -> str:
        return self.get_cuda_visible_devices()


def main() -> None:
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 1024**2,
    )
    shared, own = RayResourcePool([2]), RayResourcePool([2])
    recipe = RayClassWithInitArgs(Viewer)
    groups = [
        RayWorkerGroup(shared, recipe, role="actor", share=0.5),
        RayWorkerGroup(
            shared, recipe, role="critic", share=0.5, worker_env={"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        ),
        RayWorkerGroup(own, recipe, role="rollout", share=1.0),
    ]
    print(" ".join("|".join(group.devices()) for group in groups))
    ray.shutdown()


if __name__ == "__main__":
    main()
