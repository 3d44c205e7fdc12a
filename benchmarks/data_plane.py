"""What moving a batch costs: `python benchmarks/data_plane.py` (`--rows 128` on a small machine).

1. `DataProto` through Ray's object store against a plain dict of numpy arrays with the same bytes. "used" means that columns may be
   written to: a received batch copies itself when it is first touched, and the arrays, which Ray leaves read-only, are copied by hand.
2. What is done to rows and columns, against the same by hand on a dict of tensors.
3. A batch on one group's workers handed to another group: by reference, against fetched by the driver and sent; two sizes.
4. A method that does nothing on all workers of a group, against the same class as bare Ray actors.

Contenders take turns; shown are median milliseconds and their ratio. A batch has 12 columns, half of its tokens are responses: 0.2 GB
by default, 48 bytes per token. One torch thread.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import ray
import torch

from hybridrl.protocol import DataProto
from hybridrl.single_controller.decorator import Dispatch, register
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.resource_pool import RayResourcePool
from hybridrl.single_controller.worker import Worker

WIDE = ("input_ids", "attention_mask", "position_ids")
NARROW = ("prompts", "responses", "response_mask")
NUMBERS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "token_level_scores", "advantages", "returns")


def make_columns(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    columns = {name: torch.randint(0, 50_000, (rows, tokens)) for name in WIDE}
    columns |= {name: torch.randint(0, 50_000, (rows, tokens // 2)) for name in NARROW}
    return columns | {name: torch.randn(rows, tokens // 2) for name in NUMBERS}


class Holder(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, rows: int, tokens: int) -> DataProto:
        return DataProto.from_dict(tensors=make_columns(rows // self.world_size, tokens))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def take(self, data: DataProto) -> int:
        return len(data)

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...


def compare(what: str, ours: Callable[[], object], theirs: Callable[[], object], *, repeats: int) -> None:
    """Print the medians of both over rounds in which each has its turn, now one first and now the other; round 0 does not count."""
    times = np.zeros((repeats + 1, 2))
    for number in range(repeats + 1):
        for place in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            (ours, theirs)[place]()
            times[number, place] = (time.perf_counter() - start) * 1e3
    left, right = np.median(times[1:], axis=0)
    print(f"  {what:<30}{left:>14.3f}{right:>16.3f}{left / right:>8.2f}")


def object_store(columns: dict[str, torch.Tensor], repeats: int) -> None:
    batch, arrays = DataProto.from_dict(tensors=columns), {name: column.numpy() for name, column in columns.items()}
    print(f"{f'object store, {sum(a.nbytes for a in arrays.values()) / 1e9:.3f} GB':<32}{'DataProto':>14}{'dict of numpy':>16}{'ratio':>8}")
    compare("put", lambda: ray.put(batch), lambda: ray.put(arrays), repeats=repeats)
    ours, theirs = ray.put(batch), ray.put(arrays)
    compare("get", lambda: ray.get(ours), lambda: ray.get(theirs), repeats=repeats)
    compare("get, used", lambda: ray.get(ours).batch, lambda: [array.copy() for array in ray.get(theirs).values()], repeats=repeats)


def rows_and_columns(columns: dict[str, torch.Tensor], repeats: int) -> None:
    batch, order = DataProto.from_dict(tensors=columns), torch.randperm(len(columns["responses"]))
    pieces, numbers = batch.chunk(8), batch.select(NUMBERS)
    parts = [{k: v.chunk(8)[i] for k, v in columns.items()} for i in range(8)]
    print(f"{'rows and columns':<32}{'DataProto':>14}{'dict of tensors':>16}{'ratio':>8}")
    cases = {
        "chunk into 8": (lambda: batch.chunk(8), lambda: {k: v.chunk(8) for k, v in columns.items()}),
        "concat of 8": (lambda: DataProto.concat(pieces), lambda: {k: torch.cat([part[k] for part in parts]) for k in columns}),
        "reorder": (lambda: batch.reorder(order), lambda: {k: v[order] for k, v in columns.items()}),
        "select 3 columns": (lambda: batch.select(WIDE), lambda: {k: columns[k] for k in WIDE}),
        "union of 3 and 6 columns": (lambda: batch.select(WIDE).union(numbers), lambda: {k: columns[k] for k in WIDE + NUMBERS}),
        "repeat twice": (lambda: batch.repeat(2), lambda: {k: v.repeat_interleave(2, 0) for k, v in columns.items()}),
    }
    for what, (ours, theirs) in cases.items():
        compare(what, ours, theirs, repeats=repeats)


def between_processes(sizes: list[tuple[int, int]], repeats: int) -> None:
    pools = [RayResourcePool([n], name_prefix=name) for name, n in (("one", 1), ("two", 2), ("two more", 2))]
    groups = [RayWorkerGroup(pool, RayClassWithInitArgs(Holder), role=pool.name_prefix) for pool in pools]
    print(f"{'hand-over, 2 to 2 workers':<32}{'by reference':>14}{'by the driver':>16}{'ratio':>8}")
    for rows, tokens in sizes:
        future = groups[1].make(rows, tokens)
        ray.wait(future.futures, num_returns=2, fetch_local=False)
        compare(f"{rows} x {tokens}", lambda f=future: groups[2].take(f), lambda f=future: groups[2].take(f.get()), repeats=repeats)
    actors = [ray.remote(Holder).remote() for _ in range(2)]
    print(f"{'call of a method that is empty':<32}{'group':>14}{'bare actors':>16}{'ratio':>8}")
    for n, group in enumerate(groups[:2], start=1):
        compare(f"workers: {n}", group.nothing, lambda n=n: ray.get([a.nothing.remote() for a in actors[:n]]), repeats=repeats * 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 1024, "tokens": 4096, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = make_columns(options.rows, options.tokens)
    store = 8 * sum(column.nbytes for column in columns.values()) + 100_000_000
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=store)
    object_store(columns, options.repeats)
    rows_and_columns(columns, options.repeats)
    between_processes([(options.rows // 16, options.tokens), (options.rows, options.tokens)], options.repeats)


if __name__ == "__main__":
    main()
