"""Cut this rank's rows into micro-batches, in agreement with all other ranks.

Both engines call it before a forward pass. Which rows share a micro-batch is `algos/partition.py`.
"""

import torch
import torch.distributed as dist

from hybridrl.algos.partition import micro_batches
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine.batching.layout import TokenGrid, token_grid

PAIR = "pair"
"""Column (B,) int64: rows with the same number are one comparison.

They stay in one micro-batch and on one rank.
"""


def split_micro_batches(
    batch: DataProto, micro: MicroBatching, *, packed: bool, device: torch.device
) -> tuple[TokenGrid, list[list[int]], int]:
    """Return the tokens, the row numbers of each micro-batch, and the most micro-batches of any rank. Collective.

    Args:
        batch: This rank's rows.
        micro: Limits of a micro-batch.
        packed: Whether a micro-batch is computed without padding.
        device: Where the ranks compare their numbers.

    Raises:
        DataError: Some rank's rows cannot be split. Raised on every rank, so that none waits for another.
    """
    grid, groups, problem = None, [], None
    try:
        grid = token_grid(batch)
        groups = micro_batches(
            grid.lengths.clamp(min=1),
            max_rows=micro.max_rows,
            max_tokens=micro.max_tokens,
            packed=packed,
            units=batch.batch.get(PAIR, None),
        )
    except DataError as error:
        problem = error
    num_passes, failed = _max_over_ranks([len(groups), int(problem is not None)], device)
    if failed:
        raise problem or DataError(
            "another rank's rows cannot be split into micro-batches; the reason is in that rank's error"
        )
    assert grid is not None, "without a grid this rank has a problem, which was raised"
    return grid, groups, num_passes


def _max_over_ranks(numbers: list[int], device: torch.device) -> list[int]:
    if dist.get_world_size() == 1:
        return numbers
    found = torch.tensor(numbers, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()
