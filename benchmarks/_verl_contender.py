"""verl's side of `benchmarks/data_plane.py`, run by an interpreter that has verl.

    python benchmarks/_verl_contender.py ROWS TOKENS

Reads names of cases from standard input, runs each once, and prints its milliseconds on a line `ms 12.3`; `ms ready`
comes first.
"""

import sys
from collections.abc import Callable, Iterator

import ray
import torch
from _contest import NUMBERS, WIDE, clock, make_columns
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@ray.remote
class Scorer(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data):
        return DataProto.from_dict(tensors={"scores": data.batch["advantages"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self):
        return None


def batch_cases(batch: DataProto) -> dict[str, Callable]:
    order = torch.randperm(len(batch))
    chunks, numbers, stored = batch.chunk(8), batch.select(NUMBERS), ray.put(batch)
    return {
        "put": lambda: ray.put(batch),
        "get": lambda: ray.get(stored),
        "get, used": lambda: ray.get(stored).batch,
        "chunk into 8": lambda: batch.chunk(8),
        "concat of 8": lambda: DataProto.concat(chunks),
        "reorder": lambda: batch.reorder(order),
        "select 3 columns": lambda: batch.select(WIDE),
        "union of 3 and 6 columns": lambda: batch.select(WIDE).union(numbers),
        "repeat twice": lambda: batch.repeat(2),
    }


def group_cases(batch: DataProto) -> Iterator[dict[str, Callable]]:
    """Yield the cases of one group after the other; advancing ends the processes of the previous group."""
    for size in (2, 4, 8):
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Scorer), device_name="cpu", use_gpu=False)
        yield {
            f"dispatch and collect, {size}": lambda group=group: group.score(batch),
            f"empty call, {size}": group.nothing,
        }
        for worker in group.workers:
            ray.kill(worker)


def report(value: object) -> None:
    print("ms", value, flush=True)


def main(rows: int, tokens: int) -> None:
    torch.set_num_threads(1)
    columns = make_columns(rows, tokens)
    store = 8 * sum(column.nbytes for column in columns.values()) + 500_000_000
    # verl cannot release a pool, so the CPUs suffice for the workers of all three groups together.
    ray.init(address="local", num_cpus=14, include_dashboard=False, log_to_driver=False, object_store_memory=store)
    batch = DataProto.from_dict(tensors=columns)
    cases, more = batch_cases(batch), group_cases(batch)
    report("ready")
    for line in sys.stdin:
        if line.strip() not in cases:
            cases |= next(more)
        report(clock(cases[line.strip()])())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
