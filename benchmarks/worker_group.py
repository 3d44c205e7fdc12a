"""Cost of the single controller: `python benchmarks/worker_group.py` (`--rows 128` on a small machine).

1. An empty method on all workers of a group, against the same Ray actors called by hand.
2. A batch dispatched by rows to all workers of a group and collected. Against a dict of numpy arrays that is split,
   sent and concatenated by hand on the same actors. The worker reads one column and answers with one new column.
3. A batch of one group's workers handed to another group by reference, against fetched by the driver and sent; two
   sizes.
4. Memory of the driver (resident, without its mapping of the object store) while 2 GB of shards pass between two
   groups.
5. One of four workers killed while the others wait for it in a collective: time until the driver raises, and the error.

Contenders run in turn. The table has median milliseconds and their ratio. A batch has 12 columns, half of its tokens
are responses: 48 bytes per token, 0.2 GB by default. One torch thread.
"""

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import ray
import torch
import torch.distributed as dist
from _contest import clock, make_columns, median_ms

from hybridrl.errors import WorkerLost
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.worker_host import CallHeader
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker

HANDOVERS, HANDOVER_BYTES = 20, 100_000_000


class Holder(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, rows: int, tokens: int) -> DataProto:
        return DataProto.from_dict(tensors=make_columns(rows // self.world_size, tokens))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make_bytes(self, num_bytes: int) -> DataProto:
        return DataProto.from_dict(
            tensors={"x": torch.zeros(1024, num_bytes // 1024 // self.world_size, dtype=torch.uint8)}
        )

    @register(Dispatch.DP_COMPUTE_METRIC)
    def take(self, data: DataProto) -> int:
        return len(data)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"scores": data.select(["advantages"]).batch["advantages"] * 2})

    @register(Dispatch.DP_COMPUTE)
    def score_arrays(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        return arrays["advantages"] * 2

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL, timeout_s=60)
    def wait_for(self, victim: int) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(1))
        if self.rank == victim:
            time.sleep(50)
        dist.all_reduce(torch.zeros(1))


def start(*sizes: int) -> list[RayWorkerGroup]:
    return [
        RayWorkerGroup(RayResourcePool([n], use_gpu=False), RayClassWithInitArgs(Holder), role=f"holder{i}")
        for i, n in enumerate(sizes)
    ]


def end(groups: list[RayWorkerGroup]) -> None:
    for group in groups:
        group.shutdown()
        group.processes.pool.release()


def compare(what: str, ours: Callable[[], object], theirs: Callable[[], object], *, repeats: int) -> None:
    left, right = median_ms([clock(ours), clock(theirs)], repeats=repeats)
    print(f"  {what:<30}{left:>14.3f}{right:>16.3f}{left / right:>8.2f}", flush=True)


def empty_calls(sizes: list[int], repeats: int) -> None:
    print(f"{'call of an empty method':<32}{'group':>14}{'bare actors':>16}{'ratio':>8}")
    for n in sizes:
        [group] = start(n)
        compare(
            f"workers: {n}",
            group.nothing,
            lambda group=group: ray.get([w.ping.remote() for w in group.workers]),
            repeats=repeats * 10,
        )
        end([group])


def dispatch_and_collect(sizes: list[int], columns: dict[str, torch.Tensor], repeats: int) -> None:
    batch, arrays = DataProto.from_dict(tensors=columns), {name: column.numpy() for name, column in columns.items()}

    def by_hand(group: RayWorkerGroup) -> np.ndarray:
        cuts = {name: np.array_split(array, group.world_size) for name, array in arrays.items()}
        shards = [ray.put({name: cut[i] for name, cut in cuts.items()}) for i in range(group.world_size)]
        header = list(CallHeader(group.processes.fencing_token, group.role, "score_arrays"))
        pairs = zip(group.workers, shards, strict=True)
        calls = [worker.call.remote(header, shard) for worker, shard in pairs]
        return np.concatenate(ray.get(calls))

    print(
        f"{f'dispatch and collect, {batch.nbytes / 1e9:.2f} GB':<32}{'DataProto':>14}{'dict of numpy':>16}{'ratio':>8}"
    )
    for n in sizes:
        [group] = start(n)
        compare(
            f"workers: {n}", lambda group=group: group.score(batch), lambda group=group: by_hand(group), repeats=repeats
        )
        end([group])


def hand_over(sizes: list[tuple[int, int]], repeats: int) -> None:
    senders, receivers = groups = start(2, 2)
    print(f"{'hand-over, 2 to 2 workers':<32}{'by reference':>14}{'by the driver':>16}{'ratio':>8}")
    for rows, tokens in sizes:
        future = senders.make(rows, tokens)
        ray.wait(future.futures, num_returns=2, fetch_local=False)
        compare(
            f"{rows} x {tokens}",
            lambda f=future: receivers.take(f),
            lambda f=future: receivers.take(f.get()),
            repeats=repeats,
        )
    end(groups)


def driver_memory() -> None:
    senders, receivers = groups = start(2, 2)
    receivers.take(senders.make_bytes(HANDOVER_BYTES))
    before, max_growth = resident_bytes(), 0
    for _ in range(HANDOVERS):
        receivers.take(senders.make_bytes(HANDOVER_BYTES))
        max_growth = max(max_growth, resident_bytes() - before)
    print(
        f"driver memory while {HANDOVERS * HANDOVER_BYTES / 1e9:.1f} GB pass\n"
        f"  grew at most by {max_growth / 1e6:.1f} MB"
    )
    end(groups)


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        _, resident, shared, *_ = map(int, f.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def death_in_a_collective() -> None:
    [group] = start(4)
    group.nothing()
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(group.process_ids[2], signal.SIGKILL)

    threading.Timer(5.0, kill).start()
    try:
        group.wait_for(2)
    except WorkerLost as error:
        print(
            "one of four killed while three wait for it\n  raised after "
            f"{time.monotonic() - killed_at[0]:.3f} s: {error}"
        )
    end([group])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 1024, "tokens": 4096, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 8, 32], help="sizes of groups for the empty call"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = make_columns(options.rows, options.tokens)
    store = 8 * sum(column.nbytes for column in columns.values()) + 500_000_000
    ray.init(
        address="local",
        num_cpus=max(8, *options.workers),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=store,
    )
    empty_calls(options.workers, options.repeats)
    dispatch_and_collect([2, 4, 8], columns, options.repeats)
    hand_over([(options.rows // 16, options.tokens), (options.rows, options.tokens)], options.repeats)
    driver_memory()
    death_in_a_collective()


if __name__ == "__main__":
    main()
