"""Cost of a batch: `python benchmarks/data_plane.py` (`--rows 128` on a small machine).

1. `DataProto` through Ray's object store, against a dict of numpy arrays with the same bytes. "used" means that columns
   may be written to. A received batch copies itself when it is first used; the arrays, which Ray leaves read-only, are
   copied by hand.
2. Operations on rows and columns, against the same by hand on a dict of tensors.
3. With `--verl-python PATH`, an interpreter that has verl: the same cases and two calls on a group of workers, by verl
   in its own process, which is idle while the others run. To make one: a virtual environment with the torch and Ray of
   this project, `pip install "tensordict<0.11" "transformers<5.11" omegaconf packaging`, then `pip install --no-deps
   verl`.

Contenders run in turn. The table has median milliseconds and our ratio to each. A batch has 12 columns, half of its
tokens are responses: 48 bytes per token, 0.2 GB by default. One torch thread. Calls on groups against plain Ray are in
`worker_group.py`.
"""

import argparse
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Self

import ray
import torch
from _contest import NUMBERS, WIDE, clock, make_columns, median_ms

from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker

Case = tuple[Callable[[], object], Callable[[], object]]


class Scorer(Worker):
    """The same worker as in `_verl_contender.py`."""

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
    chunks, numbers = batch.chunk(8), batch.select(NUMBERS)
    parts = [{k: v.chunk(8)[i] for k, v in columns.items()} for i in range(8)]
    return {
        "chunk into 8": (lambda: batch.chunk(8), lambda: {k: v.chunk(8) for k, v in columns.items()}),
        "concat of 8": (
            lambda: DataProto.concat(chunks),
            lambda: {k: torch.cat([part[k] for part in parts]) for k in columns},
        ),
        "reorder": (lambda: batch.reorder(order), lambda: {k: v[order] for k, v in columns.items()}),
        "select 3 columns": (lambda: batch.select(WIDE), lambda: {k: columns[k] for k in WIDE}),
        "union of 3 and 6 columns": (
            lambda: batch.select(WIDE).union(numbers),
            lambda: {k: columns[k] for k in WIDE + NUMBERS},
        ),
        "repeat twice": (lambda: batch.repeat(2), lambda: {k: v.repeat_interleave(2, 0) for k, v in columns.items()}),
    }


class Verl:
    """verl in its own process, idle between cases."""

    def __init__(self, python: str, rows: int, tokens: int):
        self.output: deque[str] = deque(maxlen=40)
        command = [python, str(Path(__file__).with_name("_verl_contender.py")), str(rows), str(tokens)]
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        # In its own session: Ray ends its processes by signals to the whole process group.
        how = {"stdin": pipe, "stdout": pipe, "stderr": both, "text": True, "start_new_session": True}
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **how)
        self.answer()

    def milliseconds(self, case: str) -> float:
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        return float(self.answer())

    def answer(self) -> str:
        """Return the next answer among its other output; timeout: 5 minutes."""
        watchdog = threading.Timer(300, self.process.kill)
        watchdog.start()
        try:
            for line in self.process.stdout:
                if line.startswith("ms "):
                    return line.removeprefix("ms ")
                self.output.append(line)
        finally:
            watchdog.cancel()
        raise SystemExit(f"verl could not be timed:\n{''.join(self.output)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def compare(name: str, ours: Callable, by_hand: Callable | None, verl: Verl | None, *, repeats: int) -> None:
    contenders = [
        clock(ours),
        *([clock(by_hand)] if by_hand else []),
        *([lambda: verl.milliseconds(name)] if verl else []),
    ]
    first, *others = median_ms(contenders, repeats=repeats)
    cells = "".join(f"{other:>12.3f}{first / other:>8.2f}" for other in others)
    print(f"  {name:<28}{first:>10.3f}{'' if by_hand else ' ' * 20}{cells}", flush=True)


def on_groups(batch: DataProto, verl: Verl, repeats: int) -> None:
    for size in (2, 4, 8):
        with (
            RayResourcePool([size], use_gpu=False) as pool,
            RayWorkerGroup(pool, RayClassWithInitArgs(Scorer)) as group,
        ):
            compare(
                f"dispatch and collect, {size}", lambda group=group: group.score(batch), None, verl, repeats=repeats
            )
            compare(f"empty call, {size}", group.nothing, None, verl, repeats=repeats * 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 1024, "tokens": 4096, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--verl-python", help="an interpreter that can import verl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = make_columns(options.rows, options.tokens)
    num_bytes = sum(column.nbytes for column in columns.values())
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=8 * num_bytes + 500_000_000,
    )
    with Verl(options.verl_python, options.rows, options.tokens) if options.verl_python else nullcontext() as verl:
        title = f"milliseconds, {num_bytes / 1e9:.3f} GB"
        print(
            f"{title:<30}{'DataProto':>10}{'by hand':>12}{'ratio':>8}" + (f"{'verl':>12}{'ratio':>8}" if verl else "")
        )
        for name, (ours, by_hand) in {**object_store(columns), **rows_and_columns(columns)}.items():
            compare(name, ours, by_hand, verl, repeats=options.repeats)
        if verl:
            on_groups(DataProto.from_dict(tensors=columns), verl, options.repeats)


if __name__ == "__main__":
    main()
