"""One of two processes that gather each other's rows: run every case and write the resulting batch.

Not a test file.

    python -m tests.support.data_plane.gathering_rank RANK NUM_RANKS FOLDER

The ranks write to FOLDER a file store, and `rank_0` and `rank_1`: {case: (columns as lists, dtypes, meta_info) or the
error's message}.
"""

import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.data_plane.reshaping import all_gather_data_proto
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from tests.support.data_plane.sample_batches import two_readers

NUM_ROWS = {
    "even": (2, 2),
    "uneven": (3, 1),
    "first without rows": (0, 2),
    "second without rows": (2, 0),
    "no rank has rows": (0, 0),
}


def rows_of(numbers: range, rank: int) -> DataProto:
    """Return columns of every kind, computed from the row numbers."""
    n = torch.tensor(numbers, dtype=torch.int64)
    ends = torch.tensor([0, *numbers]).cumsum(0) if len(n) else torch.zeros(1, dtype=torch.int64)
    return DataProto.from_dict(
        {
            "wide": torch.stack([n, n + 0.5], dim=1).to(torch.bfloat16),
            "strided": torch.stack([n, -n]).t(),
            "fp8": n.float().to(torch.float8_e4m3fn),
            "flag": n % 2 == 0,
            "one": n.to(torch.uint8),
            "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(int(ends[-1])).to(torch.float16), ends),
            "jagged last": torch.nested.nested_tensor_from_jagged(
                torch.arange(2.0 * ends[-1]).view(2, -1), ends, jagged_dim=2
            ),
        },
        {"name": np.array([{"n": i} for i in numbers], dtype=object), "weight": np.array(numbers, dtype=np.float32)},
        {"rank": rank},
    )


def share(sizes: tuple[int, int], rank: int) -> DataProto:
    return rows_of(range(1, sizes[0] + 1) if rank == 0 else range(sizes[0] + 1, sum(sizes) + 1), rank)


def as_lists(data: DataProto) -> tuple[dict, dict, dict]:
    tensors = {} if data.batch is None else dict(data.batch.items())
    columns = {k: [row.double().tolist() for row in v.unbind()] for k, v in tensors.items()}
    columns |= {k: v.tolist() for k, v in data.non_tensor_batch.items()}
    return columns, {k: str(v.dtype) for k, v in {**tensors, **data.non_tensor_batch}.items()}, data.meta_info


def gathered(data: DataProto, group: dist.ProcessGroup | None = None) -> tuple[dict, dict, dict] | str:
    try:
        all_gather_data_proto(data, group)
    except DataError as error:
        return str(error)
    return as_lists(data)


def received(rank: int) -> tuple[dict, dict, dict]:
    """Gather and write to a batch over memory that another reader shares."""
    mine, other = two_readers(share((2, 2), rank))
    before = as_lists(other)
    all_gather_data_proto(mine)
    mine.batch["wide"].zero_()
    assert as_lists(other) == before
    return as_lists(mine)


def cases(rank: int) -> dict[str, Callable]:
    alone = dist.new_group([0]), dist.new_group([1])
    return {
        **{name: lambda sizes=sizes: gathered(share(sizes, rank)) for name, sizes in NUM_ROWS.items()},
        "unaware of the columns": lambda: gathered(share((3, 0), 0) if rank == 0 else DataProto(meta_info={"rank": 1})),
        "only arrays": lambda: gathered(DataProto.from_dict(non_tensors={"x": [rank] * (rank + 1)})),
        "a group of its own": lambda: gathered(share((1, 2), rank), alone[rank]),
        "received": lambda: received(rank),
        "other columns": lambda: gathered(DataProto.from_dict({"xy"[rank]: torch.zeros(1)})),
        "other dtypes": lambda: gathered(
            DataProto.from_dict({"x": torch.zeros(1, dtype=[torch.int64, torch.float32][rank])})
        ),
        "other widths": lambda: gathered(DataProto.from_dict({"x": torch.zeros(1, 2 + rank)})),
        "jagged here, dense there": lambda: gathered(
            DataProto.from_dict({"x": [torch.zeros(1, 2), share((1, 0), 0).batch["jagged"]][rank]})
        ),
    }


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {name: case() for name, case in cases(rank).items()}
    (folder / f"rank_{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
