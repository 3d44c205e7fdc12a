"""Arrange the rows of a micro-batch as one packed row in which common prefixes are computed once.

The layout is that of `layout.py` with other indices. A token's position is the one it has in its row. Rows that share
their prompt read the log-prob of their first response token from the same state, that of the prompt's last token. The
gradients of all rows add up there, which is what separate rows give.

Shapes: as in `layout.py`; T tokens of the tree.
"""

import logging
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from hybridrl.algos.partition import prefix_tree
from hybridrl.algos.partition.prefix_tree import PrefixTree
from hybridrl.algos.partition.row_images import prefix_rows
from hybridrl.workers.engine.attention.spans import AttentionTree, sequence_spans
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine.batching.layout import TokenGrid, TokenLayout

logger = logging.getLogger(__name__)


def tree_micro_batches(grid: TokenGrid, micro: MicroBatching) -> list[list[int]]:
    """Return the row numbers of each micro-batch: rows that share a prefix together, as far as the limits allow.

    Raises:
        DataError: A single row exceeds the token budget.
    """
    rows = prefix_rows(grid.input_ids, grid.is_real, None if grid.images is None else grid.images.rows)
    if torch.is_grad_enabled() and len(rows) > 1 and len(prefix_tree.prefix_groups(rows)) == len(rows):
        _log_nothing_shared()
    return prefix_tree.tree_micro_batches(rows, max_rows=micro.max_rows, max_tokens=micro.max_tokens)


@cache
def _log_nothing_shared() -> None:
    """Log once in a process that an update had nothing to share.

    The log-prob pass of a probe of the weights says nothing: its rows share nothing by design.
    """
    logger.warning(
        "use_prefix_grouper=True: no two rows of an update begin with the same %d tokens; every row is computed alone.",
        prefix_tree.MIN_SHARED_TOKENS,
    )


def make_tree_layout(grid: TokenGrid, rows: list[int]) -> TokenLayout:
    """Return the layout (1,T) of some rows of a batch. Adjacent rows share their prefixes."""
    tokens = prefix_tree.real_tokens(grid.input_ids[rows], grid.is_real[rows])
    tokens = [ids if len(ids) else np.zeros(1, dtype=np.int64) for ids in tokens]  # the model needs an input
    images = None if grid.images is None else [grid.images.rows[row] for row in rows]
    keys = tokens if images is None else prefix_rows(grid.input_ids[rows], grid.is_real[rows], images)
    tree = prefix_tree.prefix_tree([key if len(key) else np.zeros(1, dtype=np.int64) for key in keys])
    places = [torch.from_numpy(place) for place in tree.places]
    input_ids = torch.zeros(1, tree.num_tokens, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    for place, ids in zip(places, tokens, strict=True):
        input_ids[0, place] = torch.from_numpy(ids)
        position_ids[0, place] = torch.arange(len(ids))
    is_response, is_real = grid.is_response[rows], grid.is_real[rows]
    row, column = is_response.nonzero(as_tuple=True)
    token = column + (grid.input_ids.size(1) - is_response.size(1))
    starts = torch.tensor([0, *accumulate(len(ids) for ids in tokens)])
    joined = torch.cat(places)
    return TokenLayout(
        input_ids=input_ids,
        position_ids=position_ids,
        state=joined[starts[row] + grid.position[rows][row, token] - 1],
        labels=grid.input_ids[rows][row, token],
        cell=row * is_response.size(1) + column,
        last=joined[starts[1:] - 1],
        places=torch.where(is_real, joined[(starts[:-1, None] + grid.position[rows]).clamp(min=0)], -1),
        shape=(len(rows), is_response.size(1)),
        tree=attention_tree(tree),
    )


def attention_tree(tree: PrefixTree) -> AttentionTree:
    """Return which tokens of a tree see each other."""
    segments = tree.segments
    return AttentionTree(
        spans=sequence_spans([segment.stop - segment.start for segment in segments]),
        segments=tuple((segment.start, segment.stop, segment.end) for segment in segments),
        ends=torch.cat([torch.full((segment.stop - segment.start,), segment.end) for segment in segments]),
        num_row_tokens=sum(len(place) for place in tree.places),
    )
