"""verl doing what `benchmarks/data_plane.py` times, run by an interpreter that has verl: prints {case: milliseconds} as JSON.

python benchmarks/_verl_contender.py ROWS TOKENS REPEATS
"""

import json
import sys

import ray
import torch
from _contest import NUMBERS, WIDE, make_columns, median_ms
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

GROUPS = (2, 4, 8)


@ray.remote
class Scorer(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data):
        return DataProto.from_dict(tensors={"scores": data.batch["advantages"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self):
        return None


def batch_cases(batch: DataProto) -> dict:
    order = torch.randperm(len(batch))
    pieces, numbers, stored = batch.chunk(8), batch.select(NUMBERS), ray.put(batch)
    return {
        "put": lambda: ray.put(batch),
        "get": lambda: ray.get(stored),
        "get, used": lambda: ray.get(stored).batch,
        "chunk into 8": lambda: batch.chunk(8),
        "concat of 8": lambda: DataProto.concat(pieces),
        "reorder": lambda: batch.reorder(order),
        "select 3 columns": lambda: batch.select(WIDE),
        "union of 3 and 6 columns": lambda: batch.select(WIDE).union(numbers),
        "repeat twice": lambda: batch.repeat(2),
    }


def main(rows: int, tokens: int, repeats: int) -> None:
    torch.set_num_threads(1)
    columns = make_columns(rows, tokens)
    store = 8 * sum(column.nbytes for column in columns.values()) + 500_000_000
    ray.init(address="local", num_cpus=80, include_dashboard=False, log_to_driver=False, object_store_memory=store)
    batch = DataProto.from_dict(tensors=columns)
    found = {name: median_ms([case], repeats=repeats)[0] for name, case in batch_cases(batch).items()}
    for size in GROUPS:
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Scorer), device_name="cpu", use_gpu=False)
        found[f"dispatch and collect, {size}"] = median_ms([lambda group=group: group.score(batch)], repeats=repeats)[0]
        found[f"empty call, {size}"] = median_ms([group.nothing], repeats=repeats * 10)[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
