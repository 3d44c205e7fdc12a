"""Dispatch mode of updates: cut a batch into mini-batches first, and into data-parallel ranks second.

So every rank takes part in every optimizer step, and a step has the same rows whatever the number of ranks. The rows
of one pair (column `pair`) stay on one rank, those of one episode (column `episode`) in one mini-batch. The driver
dispatches. The worker separates its rows again with `split_mini_batches`. The `UpdatePlan` in the batch's `meta_info`
says how. Without one, the whole batch is one optimizer step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hybridrl import algos
from hybridrl.algos.partition import balanced_partition
from hybridrl.algos.partition.row_images import images_of, prefix_rows
from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import make_nd_compute_dataproto_dispatch_fn, send_parts
from hybridrl.workers.engine.batching.micro_batches import PAIR

COLUMN = "mini_batch"


def dispatch_mini_batches(mesh: str, group, data: DataProto, **kwargs) -> tuple[tuple, dict]:
    """Return one shard per worker, with a column `mini_batch` (int64): the optimizer step of each row.

    Workers with the same data-parallel rank on the mesh get the same shard.
    """
    dp_ranks, _ = group.dp_layout(mesh)
    num_parts = max(dp_ranks) + 1
    plan = UpdatePlan.of(data.meta_info)
    mini_batches = _mini_batches(data, plan)
    lengths = data.batch["attention_mask"].sum(-1).numpy()
    pairs = data.batch[PAIR].numpy() if PAIR in data.batch.keys() else np.arange(len(data))
    step_of_row, part_of_row = np.zeros((2, len(data)), dtype=np.int64)
    for step, mini in enumerate(mini_batches):
        step_of_row[mini] = step
        if plan.share_prefixes and plan.balance and num_parts > 1:
            part_of_row[mini] = _parts_by_prefix(data, mini, num_parts)
        else:
            part_of_row[mini] = _parts(lengths[mini], pairs[mini], num_parts, balance=plan.balance)
    rows = np.concatenate([*mini_batches, np.zeros(0, dtype=np.int64)])
    rows = rows[np.argsort(part_of_row[rows], kind="stable")]  # of each part by optimizer step, as in the mini-batch
    ends = np.bincount(part_of_row, minlength=num_parts).cumsum().tolist()
    names = [str(name) for name in data.batch.keys() if name != UpdatePlan.EPISODE]
    planned = data.select(batch_keys=names)
    planned.batch[COLUMN] = torch.from_numpy(step_of_row)
    planned.meta_info = replace(plan, num_mini_batches=len(mini_batches)).put_into(data.meta_info)
    shards = planned.select_idxs(rows).split_at(list(pairwise([0, *ends])))
    return (send_parts(group, shards, dp_ranks),), {k: [group.put(v)] * group.world_size for k, v in kwargs.items()}


def _mini_batches(data: DataProto, plan: UpdatePlan) -> list[np.ndarray]:
    """Return the rows of each optimizer step. Episodes are in the order of their first rows, or shuffled."""
    columns = data.batch
    episodes = columns[plan.EPISODE].numpy() if plan.EPISODE in columns.keys() else np.arange(len(data))
    units = _in_order_of_first_rows(episodes)
    num_units = int(units.max(initial=-1)) + 1
    seed = plan.shuffle_seed
    order = np.arange(num_units) if seed is None else np.random.default_rng(seed).permutation(num_units)
    place_of_row = np.argsort(order)[units]
    rows, size = np.argsort(place_of_row, kind="stable"), plan.mini_batch_size or max(1, num_units)
    starts = np.searchsorted(place_of_row[rows], np.arange(0, num_units, size))
    return np.split(rows, starts[1:]) if num_units else []


def _in_order_of_first_rows(labels: np.ndarray) -> np.ndarray:
    """Return a number for each row, equal for equal labels: labels are numbered in the order of their first rows."""
    _, first_row, number = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_row))[number]


def _parts(lengths: np.ndarray, pairs: np.ndarray, num_parts: int, *, balance: bool) -> np.ndarray:
    """Return the part of each row, (B,) int64. Rows of one pair are in one part."""
    unit_of_row = _in_order_of_first_rows(pairs)
    weights = np.bincount(unit_of_row, weights=lengths)
    if balance and num_parts > 1:
        parts = balanced_partition(weights.tolist(), num_parts)
    else:
        parts = [part.tolist() for part in np.array_split(np.arange(len(weights)), num_parts)]
    return _part_of_each(parts, len(weights))[unit_of_row]


def _parts_by_prefix(data: DataProto, rows: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the part of each of the rows, (B,) int64. Rows with a common prefix are in one part where that pays."""
    images = images_of(data)
    own = None if images is None else [images[row] for row in rows]
    tokens = prefix_rows(data.batch["input_ids"][rows], data.batch["attention_mask"][rows], own)
    return _part_of_each(algos.prefix_tree.balanced_tree_parts(tokens, num_parts), len(rows))


def _part_of_each(parts: Sequence[Sequence[int]], number: int) -> np.ndarray:
    """Return the part of each of `number` indices, (number,) int64."""
    part_of = np.zeros(number, dtype=np.int64)
    part_of[[index for part in parts for index in part]] = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    return part_of


ENGINE_MESH = "engine"
"""Mesh of the workers' positions in their training engine, see `EngineWorker`."""
ENGINE_COMPUTE = make_nd_compute_dataproto_dispatch_fn(ENGINE_MESH)
MINI_BATCH_COMPUTE: dict[str, Callable[..., Any]] = {
    "dispatch_fn": partial(dispatch_mini_batches, ENGINE_MESH),
    "collect_fn": ENGINE_COMPUTE["collect_fn"],
}


def split_mini_batches(data: DataProto) -> Iterator[DataProto]:
    """Yield this rank's rows of each optimizer step, in order. A step without rows yields an empty batch.

    A batch that was dispatched in another mode is one optimizer step.

    Raises:
        DataError: The batch has the column of a dispatch, but no number of mini-batches, or the reverse.
    """
    num_mini_batches, was_cut = UpdatePlan.of(data.meta_info).num_mini_batches, COLUMN in data.batch.keys()
    if was_cut != (num_mini_batches is not None):
        raise DataError(
            f"meta_info {UpdatePlan.KEY}.num_mini_batches={num_mini_batches}, and the batch has "
            f"{'a' if was_cut else 'no'} column {COLUMN!r}: the dispatch of updates sets both; keep both or remove both"
        )
    if num_mini_batches is None:
        yield data
        return
    for step in range(num_mini_batches):
        yield data.select_idxs(data.batch[COLUMN] == step)
