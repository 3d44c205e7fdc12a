"""Worker classes that the tests of the single controller run in real processes."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.data_plane.conversion import TensorDict
from hybridrl.data_plane.futures import arrays_of, stored
from hybridrl.errors import CallTimeout
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from hybridrl.single_controller.monitoring.work_done import report_work
from hybridrl.single_controller.worker import Worker
from hybridrl.workers.process_setup import join_process_group

PEERS_SLEEP_S = 80.0  # of a rank that fails: who waits for all ranks waits for so long


class LatePeer(Worker):
    """Ranks of one process group, in which a collective waits for two seconds."""

    @register(Dispatch.ONE_TO_ALL)
    def sum_without(self, absent: int) -> None:
        join_process_group("cpu", call_timeout_s=1.0)
        if self.rank == absent:
            time.sleep(PEERS_SLEEP_S)
        dist.all_reduce(torch.ones(1))


class Adder(Worker):
    def __init__(self, amount: int, role: str = "adder"):
        self.amount, self.role = amount, role

    @register(Dispatch.ONE_TO_ALL)
    def rank_and_pid(self) -> tuple[int, int, int]:
        return self.rank, self.world_size, os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def objects_between_collections(self) -> int:
        return gc.get_threshold()[0]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            tensors={"x": data.batch["x"] + self.amount, "rank": torch.full((len(data),), self.rank)}, non_tensors={}
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_async(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] + self.amount})

    @register(Dispatch.ONE_TO_ALL)
    def say(self, words: str) -> None:
        print(f"out: {words}")
        print(f"err: {words}", file=sys.stderr)

    @register(Dispatch.ONE_TO_ALL)
    def count(self, total: int, until: str) -> None:
        """Report half of the work, and wait for the file `until`."""
        report_work(total // 2, total, "rows")
        self.doze_until(until)

    def wait_long(self) -> None:
        time.sleep(PEERS_SLEEP_S)

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

    @register(Dispatch.ONE_TO_ALL, timeout_s=100)
    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError(f"planted on {rank}")
        time.sleep(PEERS_SLEEP_S)

    @register(Dispatch.ONE_TO_ALL, timeout_s=100)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PEERS_SLEEP_S)

    @register(Dispatch.ONE_TO_ALL, timeout_s=30)
    def give_up_on(self, rank: int) -> None:
        """Rank `rank` dies; the others time out before Ray reports the death."""
        if self.rank == rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise CallTimeout("nothing came")

    @register(Dispatch.ONE_TO_ALL)
    def doze(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def doze_until(self, until: str) -> None:
        """Wait for the file `until`: a test sees the call at work, however slow the machine is."""
        end = time.monotonic() + PEERS_SLEEP_S
        while not os.path.exists(until) and time.monotonic() < end:
            time.sleep(0.02)

    @register(Dispatch.ONE_TO_ALL, timeout_s=2)
    def sleep_on(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(10)

    @register(Dispatch.ONE_TO_ALL)
    def announce(self, tensor_parallel: int) -> None:
        self._register_dispatch_collect_info("mesh", self.rank // tensor_parallel, self.rank % tensor_parallel == 0)

    @register(make_nd_compute_dataproto_dispatch_fn("mesh"))
    def add_on_mesh(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            tensors={"x": data.batch["x"] + self.amount, "rank": torch.full((len(data),), self.rank)}
        )


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
    """Overrides a registered method without registering it again."""

    def own(self, value: int) -> int:
        return -value


class Waiter(Worker):
    """Methods that run concurrently, and methods that return facts about their arguments."""

    @register(Dispatch.ONE_TO_ALL)
    async def sleep_async(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def meet(self, number: int) -> int:
        """Return when two calls run at once."""
        self.__dict__.setdefault("inside", []).append(number)
        while len(self.inside) < 2:
            await asyncio.sleep(0.005)
        return number

    @register(Dispatch.ONE_TO_ALL, concurrency=4, blocking=False)
    def sleep_in_thread(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL, concurrency=4, blocking=False)
    def meet_in_thread(self, count: int) -> int:
        """Return when `count` calls run at once."""
        self.__dict__.setdefault("meeting", threading.Barrier(count)).wait(60)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    async def fail_async(self) -> None:
        raise KeyError("planted in a coroutine")

    @register(Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def count_up(self, start: int) -> DataProto:
        """Return r + 1 rows on rank r: start, start + 1, ..."""
        first = start + self.rank * (self.rank + 1) // 2
        return DataProto.from_dict(tensors={"x": torch.arange(first, first + self.rank + 1)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def pass_on(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)})

    @register(Dispatch.ONE_TO_ALL)
    def count_rows(self, data: DataProto) -> int:
        return len(data)

    @register(Dispatch.DP_COMPUTE_METRIC, materialize_futures=False)
    def kind(self, data) -> str:
        return type(data).__name__

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double_tensordict(self, data: TensorDict) -> TensorDict:
        return TensorDict({"x": data["x"] * 2}, batch_size=data.batch_size)

    @register(Dispatch.ONE_TO_ALL)
    def roles_in_process(self) -> list[str]:
        return sorted(self.fused_worker_dict)

    @register(Dispatch.ONE_TO_ALL, timeout_s=90)
    def reduce_until_killed(self, victim: int, path: str = "") -> None:
        """All other ranks wait in a collective that the victim never joins; the victim creates the file `path`."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(1))
        if self.rank == victim:
            if path:
                open(path, "w").close()
            time.sleep(80)
        dist.all_reduce(torch.zeros(1))

    @register(Dispatch.ONE_TO_ALL, timeout_s=60)
    def sleep_long(self, path: str) -> None:
        """Create the file `path`.RANK, then sleep."""
        with open(f"{path}.{self.rank}", "w"):
            pass
        time.sleep(50)

    @register(Dispatch.ONE_TO_ALL)
    def announce_backwards(self) -> None:
        self._register_dispatch_collect_info("backwards", self.world_size - 1 - self.rank, True)

    @register(make_nd_compute_dataproto_dispatch_fn("backwards"))
    def rank_of_rows(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)})

    @register(Dispatch.ONE_TO_ALL)
    def announce_rank_0_only(self) -> None:
        self._register_dispatch_collect_info("mute", self.rank, self.rank == 0)

    @register(make_nd_compute_dataproto_dispatch_fn("mute"))
    def mute(self, data: DataProto) -> DataProto:
        return data

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self, number: int) -> int:
        return number + self.rank


class Counter(Worker):
    """Keeps state between calls."""

    def __init__(self):
        super().__init__()
        self.number = 0

    @register(Dispatch.ONE_TO_ALL)
    def add(self, amount: int) -> int:
        self.number += amount
        return self.number

    @register(Dispatch.ONE_TO_ALL)
    def total(self) -> int:
        return self.number


class ArrayWorker(Worker):
    """Makes and reads the column `arrays`: row i has arrays of `size` numbers i."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, data: DataProto, size: int) -> DataProto:
        arrays = stored([np.full(size, row, dtype=np.int64) for row in data.batch["x"].tolist()])
        return DataProto.from_dict({"x": data.batch["x"]}, {"arrays": one_object_per_row(arrays)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def sums(self, data: DataProto) -> DataProto:
        sums = [int(array.sum()) for array in arrays_of(data.non_tensor_batch["arrays"])]
        return DataProto.from_dict({"x": data.batch["x"], "sums": torch.tensor(sums, dtype=torch.int64)})
