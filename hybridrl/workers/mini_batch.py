"""The dispatch mode of updates: a batch is cut into mini-batches first and into data-parallel ranks second.

Every rank then takes part in every optimizer step, a step sees the same rows whatever the number of ranks, and each
rank gets about the same number of tokens. What the caller wants stands in `meta_info`:

    mini_batch_size   rows of one optimizer step; absent: the whole batch
    shuffle_seed      shuffle rows before cutting; absent: in order
    balance           share the tokens of a mini-batch evenly over ranks; absent: rows in order
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from hybridrl.algos.partition import balanced_partition
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import make_nd_compute_dataproto_dispatch_fn

COLUMN = "mini_batch"


def dispatch_mini_batches(mesh: str, group, data: DataProto, **kwargs) -> tuple[tuple, dict]:
    """Return one piece per worker with a column `mini_batch` (int64): which optimizer step each row belongs to.

    Workers with the same data-parallel rank on the mesh get the same piece.
    """
    dp_ranks, _ = group.dp_layout(mesh)
    num_parts = max(dp_ranks) + 1
    order = _row_order(len(data), data.meta_info.get("shuffle_seed"))
    size = data.meta_info.get("mini_batch_size") or max(1, len(data))
    lengths = data.batch["attention_mask"].sum(-1).numpy()
    rows: list[list[int]] = [[] for _ in range(num_parts)]
    step_of_row = np.zeros(len(data), dtype=np.int64)
    for step, start in enumerate(range(0, len(data), size)):
        mini = order[start : start + size]
        step_of_row[mini] = step
        for rank, part in enumerate(_shares(lengths[mini], num_parts, balance=data.meta_info.get("balance", False))):
            rows[rank].extend(mini[part].tolist())
    pieces = [data.select_idxs(np.array(r, dtype=np.int64)) for r in rows]
    for piece, own_rows in zip(pieces, rows, strict=True):
        piece.batch[COLUMN] = torch.from_numpy(step_of_row[own_rows])
        piece.meta_info = data.meta_info | {"num_mini_batches": -(-len(data) // size)}
    if num_parts < group.world_size:  # what peers share is put once
        shared = [group.put(piece) for piece in pieces]
        pieces = [shared[dp_rank] for dp_rank in dp_ranks]
    return (pieces,), {k: [group.put(v)] * group.world_size for k, v in kwargs.items()}


def _row_order(num_rows: int, seed: int | None) -> np.ndarray:
    return np.arange(num_rows) if seed is None else np.random.default_rng(seed).permutation(num_rows)


def _shares(lengths: np.ndarray, num_parts: int, *, balance: bool) -> list[np.ndarray]:
    if balance and num_parts > 1:
        return [np.array(part, dtype=np.int64) for part in balanced_partition(lengths.tolist(), num_parts)]
    return np.array_split(np.arange(len(lengths)), num_parts)


ENGINE_MESH = "engine"
"""Where workers stand with respect to their training engine; see `EngineWorker`."""
ENGINE_COMPUTE = make_nd_compute_dataproto_dispatch_fn(ENGINE_MESH)
MINI_BATCH_COMPUTE = {
    "dispatch_fn": partial(dispatch_mini_batches, ENGINE_MESH),
    "collect_fn": ENGINE_COMPUTE["collect_fn"],
}


def mini_batches(data: DataProto) -> Iterator[DataProto]:
    """Yield this rank's rows of each optimizer step, in step order; a rank without rows in a step gets
    an empty batch.
    """
    steps = data.batch[COLUMN] if COLUMN in data.batch.keys() else torch.zeros(len(data), dtype=torch.int64)
    for step in range(data.meta_info.get("num_mini_batches", 1)):
        yield data.select_idxs(steps == step)
