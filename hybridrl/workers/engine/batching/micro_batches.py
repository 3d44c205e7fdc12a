"""Cut this rank's rows into micro-batches, in agreement with all other ranks.

Both engines call it before a forward pass. Which rows share a micro-batch is `algos/partition/balanced.py`.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridrl.algos.partition import micro_batches
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine import batching
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine.batching.layout import TokenGrid, TokenLayout, make_layout, placeholder_grid, token_grid

if TYPE_CHECKING:  # only runs with images, or that replay routes, load them
    from hybridrl.workers.engine.image_model import BlankImage
    from hybridrl.workers.engine.routing.replay import RouteReplay

PAIR = "pair"
"""Column (B,) int64: rows with the same number are one comparison.

They stay in one micro-batch and on one rank.
"""


def split_micro_batches(
    batch: DataProto,
    micro: MicroBatching,
    *,
    packed: bool,
    shared: bool = False,
    device: torch.device,
    replay: "RouteReplay | None" = None,
    blank: "BlankImage | None" = None,
) -> tuple[TokenGrid, list[list[int]], int]:
    """Return the tokens, the row numbers of each micro-batch, and the most micro-batches of any rank. Collective.

    Args:
        batch: This rank's rows.
        micro: Limits of a micro-batch.
        packed: Whether a micro-batch is computed without padding.
        shared: Whether a micro-batch is computed as prefix trees. Rows with a common prefix stay together then.
        device: Where the ranks compare their numbers.
        replay: Checks the routes of the rows.
        blank: The blank image of a model that reads images.

    Raises:
        DataError: Some rank's rows cannot be split. Raised on every rank, so that none waits for another.
    """
    grid, groups, problem = None, [], None
    try:
        grid = token_grid(batch, blank)
        if replay is not None:
            replay.check(batch)
        by_prefix = shared and PAIR not in batch.batch.keys()
        groups = (
            batching.tree_micro_batches(grid, micro) if by_prefix else _by_length(batch, grid, micro, packed=packed)
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


def _by_length(batch: DataProto, grid: TokenGrid, micro: MicroBatching, *, packed: bool) -> list[list[int]]:
    return micro_batches(
        grid.lengths.clamp(min=1),
        max_rows=micro.max_rows,
        max_tokens=micro.max_tokens,
        packed=packed,
        units=batch.batch.get(PAIR, None),
    )


def layout_of(grid: TokenGrid, rows: list[int], *, packed: bool, shared: bool) -> TokenLayout:
    """Return the layout of the rows of a micro-batch; without rows, that of a placeholder."""
    if not rows:
        grid, rows = placeholder_grid(grid.images), [0]
    layout = batching.make_tree_layout(grid, rows) if shared else make_layout(grid, rows, packed=packed)
    return layout if grid.images is None else batching.with_images(layout, grid.images, rows)


def _max_over_ranks(numbers: list[int], device: torch.device) -> list[int]:
    if dist.get_world_size() == 1:
        return numbers
    found = torch.tensor(numbers, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()
