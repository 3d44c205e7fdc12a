"""Prefix trees over the rows of a batch: rows that begin with the same tokens compute them once.

The n responses to one prompt share the prompt; turns of one conversation share what was said before. A tree is a
sequence of segments in depth-first order. A segment's tokens see those of its ancestors and of itself, and no others.
The functions take token ids and return positions; they know no model. All of them are deterministic.

The same idea is known as prefix grouping (https://github.com/johncaged/PrefixGrouper) and as tree training (AReaL).

Shapes: T tokens of a tree.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from hybridrl.algos.partition.balanced import balanced_partition, check_fits

MIN_SHARED_TOKENS = 8
"""Rows branch only where they share at least as many tokens since the last branch.

A branch costs one more call of attention in every layer, which fewer tokens do not repay.
"""

Row = np.ndarray
"""Token ids (n,) int64 of one row without padding."""


@dataclass
class Segment:
    """Consecutive tokens of a tree that the same rows share.

    Attributes:
        start, stop: Its tokens, counted in the tree.
        depth: Position of its first token in the rows.
        end: Where its subtree ends; tokens from `stop` to `end` see the segment.
    """

    start: int
    stop: int
    depth: int
    end: int = 0

    @property
    def bottom(self) -> int:
        """Return the position in the rows after its last token."""
        return self.depth + self.stop - self.start


@dataclass(frozen=True)
class PrefixTree:
    """Segments of some rows, and where each row's tokens are.

    Attributes:
        segments: In depth-first order. They cover the T tokens of the tree without gaps.
        places: Index in the tree of each token of each row, int64 of the row's length.
    """

    segments: list[Segment]
    places: list[np.ndarray]

    @property
    def num_tokens(self) -> int:
        """Return T, the tokens that are computed."""
        return self.segments[-1].stop if self.segments else 0


class _TreeBuilder:
    """Adds rows one by one. A row shares tokens only with the row before it, so equal prefixes should be adjacent."""

    def __init__(self, min_shared: int):
        self.min_shared = min_shared
        self.segments: list[Segment] = []
        self.num_tokens = self.num_rows = 0
        self._path: list[Segment] = []  # of the row that was added last

    def branch_depth(self, shared: int) -> int:
        """Return how many tokens the next row shares, given its first tokens in common with the last row."""
        if shared < self.min_shared:
            return 0
        for segment in reversed(self._path):
            if shared >= segment.bottom:
                return segment.bottom
            if shared - segment.depth >= self.min_shared:
                return shared
        return 0

    def add(self, length: int, shared: int) -> np.ndarray:
        """Add a row and return the places of its tokens."""
        depth = self.branch_depth(shared)
        while self._path and self._path[-1].depth >= depth:
            self._path.pop()
        if self._path and self._path[-1].bottom > depth:
            self._split(self._path[-1], depth)
        if length > depth:
            self._path.append(Segment(self.num_tokens, self.num_tokens + length - depth, depth))
            self.segments.append(self._path[-1])
            self.num_tokens += length - depth
        self.num_rows += 1
        return np.concatenate([np.arange(0), *(np.arange(part.start, part.stop) for part in self._path)])

    def _split(self, segment: Segment, depth: int) -> None:
        cut = segment.start + depth - segment.depth
        self.segments.append(Segment(cut, segment.stop, depth))
        segment.stop = cut

    def finished(self) -> list[Segment]:
        """Return the segments in depth-first order, with the ends of their subtrees."""
        ordered = sorted(self.segments, key=lambda segment: segment.start)
        is_open: list[Segment] = []
        for segment in ordered:
            while is_open and is_open[-1].bottom > segment.depth:
                is_open.pop().end = segment.start
            is_open.append(segment)
        for segment in is_open:
            segment.end = self.num_tokens
        return ordered


def prefix_tree(rows: Sequence[Row], *, min_shared: int = MIN_SHARED_TOKENS) -> PrefixTree:
    """Return the tree of some rows, each of which may share tokens with the row before it."""
    builder = _TreeBuilder(min_shared)
    before: Row = np.arange(0)
    places = []
    for row in rows:
        places.append(builder.add(len(row), common_length(before, row)))
        before = row
    return PrefixTree(builder.finished(), places)


def common_length(one: Row, other: Row) -> int:
    """Return the number of first tokens in which two rows agree."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def real_tokens(input_ids_BL: torch.Tensor, is_real_BL: torch.Tensor) -> list[Row]:
    """Return the rows of a padded batch without padding."""
    is_real = is_real_BL.bool()
    return [ids[real].numpy() for ids, real in zip(input_ids_BL.cpu(), is_real.cpu(), strict=True)]


def prefix_groups(rows: Sequence[Row], *, min_shared: int = MIN_SHARED_TOKENS) -> list[list[int]]:
    """Return groups of row indices, rows with common prefixes adjacent.

    Rows of different groups share fewer than `min_shared` first tokens.
    """
    order = sorted(range(len(rows)), key=lambda row: (rows[row].tobytes(), row))  # the order of bytes keeps prefixes
    groups = [order[:1]] if order else []
    for one, other in pairwise(order):
        if common_length(rows[one], rows[other]) >= min_shared:
            groups[-1].append(other)
        else:
            groups.append([other])
    return groups


def tree_micro_batches(
    rows: Sequence[Row],
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    min_shared: int = MIN_SHARED_TOKENS,
) -> list[list[int]]:
    """Return groups of row indices for which trees are small; the group with the most tokens comes first.

    Each row is in exactly one group, and adjacent rows of a group share prefixes. Rows that share a prefix stay
    together as far as the limits allow; a prefix is then computed once in each of their groups.

    Args:
        rows: Tokens of each row. A row without tokens counts as one.
        max_rows: Largest number of rows of a group. None is no limit.
        max_tokens: Largest tree of a group, in tokens. None is no limit.
        min_shared: Rows share a prefix of at least as many tokens.

    Raises:
        DataError: A single row has more than `max_tokens` tokens.
    """
    most_rows, most_tokens = max_rows or len(rows), math.inf if max_tokens is None else max_tokens
    lengths = [max(1, len(row)) for row in rows]
    for row in range(len(rows)):
        check_fits([row], lengths, most_rows, most_tokens, packed=True)
    pieces = [
        (cost, number, piece)
        for number, group in enumerate(prefix_groups(rows, min_shared=min_shared))
        for cost, piece in _pieces(group, rows, max_rows=most_rows, max_tokens=most_tokens, min_shared=min_shared)
    ]
    return _first_fit(pieces, max_rows=most_rows, max_tokens=most_tokens)


def _pieces(
    group: list[int], rows: Sequence[Row], *, max_rows: int, max_tokens: float, min_shared: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield (tokens of the tree, rows) of parts of a group, each as large as the limits allow."""
    builder, piece = _TreeBuilder(min_shared), group[:1]
    builder.add(max(1, len(rows[group[0]])), 0)
    for one, other in pairwise(group):
        shared, length = common_length(rows[one], rows[other]), max(1, len(rows[other]))
        cost = builder.num_tokens + length - builder.branch_depth(shared)
        if cost > max_tokens or len(piece) == max_rows:
            yield builder.num_tokens, piece
            builder, piece, shared = _TreeBuilder(min_shared), [], 0
        builder.add(length, shared)
        piece.append(other)
    yield builder.num_tokens, piece


def _first_fit(pieces: list[tuple[int, int, list[int]]], *, max_rows: int, max_tokens: float) -> list[list[int]]:
    """Put each (tokens, group, rows), by decreasing tokens, where it fits; parts of one group stay apart.

    Their common tree may have more tokens than the parts have, because branches need `min_shared` tokens.
    """
    found: list[tuple[list[int], set[int]]] = []
    remaining: list[float] = []
    for cost, number, piece in sorted(pieces, key=lambda piece: (-piece[0], piece[2])):
        for place, (members, numbers) in enumerate(found):
            if cost <= remaining[place] and len(members) + len(piece) <= max_rows and number not in numbers:
                break
        else:
            place = len(found)
            found.append(([], set()))
            remaining.append(max_tokens)
        found[place][0].extend(piece)
        found[place][1].add(number)
        remaining[place] -= cost
    return [members for members, _ in found]


def balanced_tree_parts(rows: Sequence[Row], num_parts: int) -> list[list[int]]:
    """Return `num_parts` lists of row indices, ascending, with nearly equal trees.

    Rows that share a prefix stay in one list, unless splitting them makes the largest tree smaller, as with fewer
    prompts than parts.
    """
    groups = prefix_groups(rows)
    costs = [tree_size(rows, group) for group in groups]
    whole = [sorted(row for group in part for row in groups[group]) for part in balanced_partition(costs, num_parts)]
    split = balanced_partition([len(row) for row in rows], num_parts)
    return min(whole, split, key=lambda parts: max(tree_size(rows, part) for part in parts))


def tree_size(rows: Sequence[Row], members: Sequence[int]) -> int:
    """Return the tokens of the tree of some of the rows."""
    ordered = sorted(members, key=lambda row: (rows[row].tobytes(), row))
    return prefix_tree([rows[row] for row in ordered]).num_tokens
