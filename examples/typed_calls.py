"""Remote calls that an editor and a type checker understand.

    python examples/typed_calls.py
    mypy examples/typed_calls.py

`group.calls` is the group with its workers' class as its type. Jump-to-definition on `add` leads to `Counter`, the
argument's type is checked, and the result's type is `DataProto`.
"""

import logging

import ray
import torch

from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, Execute, register
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker


class Counter(Worker):
    def __init__(self, step: int):
        self.step = step

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        """Return the batch's `x` with this worker's step added."""
        return DataProto.from_dict(tensors={"x": data.batch["x"] + self.step})

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def describe(self, word: str) -> str:
        return f"{word} {self.world_size}"


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with (
        RayResourcePool([2], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 1), role="counter") as group,
    ):
        batch = DataProto.from_dict(tensors={"x": torch.arange(5)})
        result: DataProto = group.calls.add(batch)
        text: str = group.calls.describe("workers:")
        print(text, result.batch["x"].tolist())
    ray.shutdown()


if __name__ == "__main__":
    main()
