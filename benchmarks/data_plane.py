"""What a batch costs: `python benchmarks/data_plane.py` (`--rows 128` on a small machine).

1. `DataProto` through Ray's object store against a plain dict of numpy arrays with the same bytes. "used" means that columns may be
   written to: a received batch copies itself when it is first touched, and the arrays, which Ray leaves read-only, are copied by hand.
2. What is done to rows and columns, against the same by hand on a dict of tensors.
3. With `--verl-python PATH`, an interpreter that has verl: the same cases by verl, one after the other in a process of its own. To make
   one: a virtual environment with the torch and Ray of this project, `pip install "tensordict<0.11" "transformers<5.11" omegaconf
   packaging`, then `pip install --no-deps verl`.

Contenders 1 and 2 take turns; shown are median milliseconds and our ratio to each. A batch has 12 columns, half of its tokens are
responses: 48 bytes per token, 0.2 GB by default. One torch thread. Calls on groups are in `worker_group.py`.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from _contest import NUMBERS, WIDE, make_columns, median_ms

from hybridrl.protocol import DataProto
from hybridrl.single_controller.decorator import Dispatch, register
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.resource_pool import RayResourcePool
from hybridrl.single_controller.worker import Worker

Case = tuple[Callable[[], object], Callable[[], object]]


class Scorer(Worker):
    """What `_verl_contender.py` has, here."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"scores": data.select(["advantages"]).batch["advantages"] * 2})

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...


def object_store(columns: dict[str, torch.Tensor]) -> dict[str, Case]:
    batch, arrays = DataProto.from_dict(tensors=columns), {name: column.numpy() for name, column in columns.items()}
    ours, theirs = ray.put(batch), ray.put(arrays)
    return {
        "put": (lambda: ray.put(batch), lambda: ray.put(arrays)),
        "get": (lambda: ray.get(ours), lambda: ray.get(theirs)),
        "get, used": (lambda: ray.get(ours).batch, lambda: [array.copy() for array in ray.get(theirs).values()]),
    }


def rows_and_columns(columns: dict[str, torch.Tensor]) -> dict[str, Case]:
    batch, order = DataProto.from_dict(tensors=columns), torch.randperm(len(columns["responses"]))
    pieces, numbers = batch.chunk(8), batch.select(NUMBERS)
    parts = [{k: v.chunk(8)[i] for k, v in columns.items()} for i in range(8)]
    return {
        "chunk into 8": (lambda: batch.chunk(8), lambda: {k: v.chunk(8) for k, v in columns.items()}),
        "concat of 8": (lambda: DataProto.concat(pieces), lambda: {k: torch.cat([part[k] for part in parts]) for k in columns}),
        "reorder": (lambda: batch.reorder(order), lambda: {k: v[order] for k, v in columns.items()}),
        "select 3 columns": (lambda: batch.select(WIDE), lambda: {k: columns[k] for k in WIDE}),
        "union of 3 and 6 columns": (lambda: batch.select(WIDE).union(numbers), lambda: {k: columns[k] for k in WIDE + NUMBERS}),
        "repeat twice": (lambda: batch.repeat(2), lambda: {k: v.repeat_interleave(2, 0) for k, v in columns.items()}),
    }


def on_groups(columns: dict[str, torch.Tensor], repeats: int) -> dict[str, float]:
    """The calls that verl is asked to make too."""
    batch, found = DataProto.from_dict(tensors=columns), {}
    for size in (2, 4, 8):
        with RayResourcePool([size], use_gpu=False) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Scorer)) as group:
            found[f"dispatch and collect, {size}"] = median_ms([lambda group=group: group.score(batch)], repeats=repeats)[0]
            found[f"empty call, {size}"] = median_ms([group.nothing], repeats=repeats * 10)[0]
    return found


def ask_verl(python: str, rows: int, tokens: int, repeats: int) -> dict[str, float]:
    script = Path(__file__).with_name("_verl_contender.py")
    command = [python, str(script), str(rows), str(tokens), str(repeats)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"verl could not be timed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def show(name: str, ours: float, by_hand: float | None, verl: float | None) -> None:
    cells = [f"{other:>12.3f}{ours / other:>8.2f}" if other else " " * 20 for other in (by_hand, verl)]
    print(f"  {name:<28}{ours:>10.3f}{''.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 1024, "tokens": 4096, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--verl-python", help="an interpreter that can import verl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = make_columns(options.rows, options.tokens)
    num_bytes = sum(column.nbytes for column in columns.values())
    verl = ask_verl(options.verl_python, options.rows, options.tokens, options.repeats) if options.verl_python else {}
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=8 * num_bytes + 500_000_000)
    title = f"milliseconds, {num_bytes / 1e9:.3f} GB"
    print(f"{title:<30}{'DataProto':>10}{'by hand':>12}{'ratio':>8}" + (f"{'verl':>12}{'ratio':>8}" if verl else ""))
    for name, case in {**object_store(columns), **rows_and_columns(columns)}.items():
        ours, by_hand = median_ms(list(case), repeats=options.repeats)
        show(name, ours, by_hand, verl.get(name))
    for name, ours in (on_groups(columns, options.repeats) if verl else {}).items():
        show(name, ours, None, verl[name])


if __name__ == "__main__":
    main()
