"""Worker classes that the tests of the single controller run in real processes."""

import os
import signal
import time

import torch
import torch.distributed as dist

from hybridrl.protocol import DataProto
from hybridrl.single_controller.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.single_controller.worker import Worker


class Adder(Worker):
    def __init__(self, amount: int, role: str = "adder"):
        self.amount, self.role = amount, role

    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int, int]:
        return self.rank, self.world_size, os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            tensors={"x": data.batch["x"] + self.amount, "rank": torch.full((len(data),), self.rank)}, non_tensors={}
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] + self.amount})

    @register(Dispatch.ALL_TO_ALL)
    def own(self, value: int) -> int:
        return value * 10 + self.rank

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def first_only(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL)
    def sum_ranks(self) -> float:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        total = torch.tensor(float(self.rank))
        dist.all_reduce(total)
        return total.item()

    @register(Dispatch.ONE_TO_ALL, timeout_s=30)
    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError(f"planted on {rank}")
        time.sleep(20)

    @register(Dispatch.ONE_TO_ALL, timeout_s=30)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)

    @register(Dispatch.ONE_TO_ALL, timeout_s=0.5)
    def sleep_on(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(2)

    @register(Dispatch.ONE_TO_ALL)
    def announce(self, tensor_parallel: int) -> None:
        self._register_dispatch_collect_info("mesh", self.rank // tensor_parallel, self.rank % tensor_parallel == 0)

    @register(make_nd_compute_dataproto_dispatch_fn("mesh"))
    def add_on_mesh(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] + self.amount, "rank": torch.full((len(data),), self.rank)})


class Doubler(Worker):
    def __init__(self, fail: bool = False):
        self.fail = fail
        if fail:
            raise ValueError("a mistake in the constructor")

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] * 2})


class QuietAdder(Adder):
    """Overrides a registered method without marking it again."""

    def own(self, value: int) -> int:
        return -value
