"""Sequences of a packed row, or the segments of a prefix tree: tokens that belong together.

Tensors only, no model. Layouts carry them to attention and to recurrent layers.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from hybridrl.workers.engine.base import COMPUTED_TOKENS, ROW_TOKENS


@dataclass(frozen=True)
class SequenceSpan:
    """Adjacent sequences of a packed row, as a padded batch of shape (b, W)."""

    # (b*W,) int64, index into the row of each cell's token; padding cells repeat a token of the span
    tokens: torch.Tensor
    cells: torch.Tensor  # (n,) int64, flat index of the n cells that hold a token, in row order
    width: int  # W

    def to(self, device: torch.device) -> "SequenceSpan":
        """Return the span with its tensors on a device."""
        return SequenceSpan(self.tokens.to(device), self.cells.to(device), self.width)


def sequence_spans(lengths: Sequence[int]) -> tuple[SequenceSpan, ...]:
    """Split a packed row, given its sequence lengths (at least 1), into spans of similar length.

    In a span no sequence is longer than twice the shortest.
    """
    groups: list[list[int]] = []
    shortest = longest = 0
    for length in lengths:
        if groups and max(longest, length) <= 2 * min(shortest, length):
            groups[-1].append(length)
            shortest, longest = min(shortest, length), max(longest, length)
        else:
            groups.append([length])
            shortest = longest = length
    starts = accumulate((sum(group) for group in groups), initial=0)
    return tuple(_span(torch.tensor(group), start) for group, start in zip(groups, starts, strict=False))


def _span(lengths: torch.Tensor, start: int) -> SequenceSpan:
    column = torch.arange(int(lengths.max()))
    first = start + lengths.cumsum(0) - lengths
    tokens = first[:, None] + column.minimum(lengths[:, None] - 1)
    return SequenceSpan(tokens.flatten(), (column < lengths[:, None]).flatten().nonzero().squeeze(-1), len(column))


@dataclass(frozen=True)
class AttentionTree:
    """Which tokens of a packed row see each other.

    Attributes:
        spans: The segments, whose tokens see themselves and those before them.
        segments: (start, stop, end) of each in depth-first order: tokens from stop to end see those from start.
        ends: (T,) int64, where the subtree of each token's segment ends.
        num_row_tokens: Tokens of all rows; those that rows share count in each of them.
    """

    spans: tuple[SequenceSpan, ...]
    segments: tuple[tuple[int, int, int], ...]
    ends: torch.Tensor
    num_row_tokens: int

    @property
    def branches(self) -> Iterator[tuple[int, int, int]]:
        """Yield the segments with a subtree."""
        return (segment for segment in self.segments if segment[2] > segment[1])

    @functools.cached_property
    def lineages(self) -> list[list[int]]:
        """Return the numbers of each segment's ancestors, from the root, and its own."""
        found: list[list[int]] = []
        for number, (start, _, _) in enumerate(self.segments):
            before = found[-1] if found else []
            found.append([*(one for one in before if self.segments[one][2] > start), number])
        return found

    @property
    def paths(self) -> Iterator[list[tuple[int, int]]]:
        """Yield (start, stop) of each segment's ancestors, from the root, and of itself."""
        return ([self.segments[number][:2] for number in lineage] for lineage in self.lineages)

    def token_counts(self) -> dict[str, float]:
        """Return an engine's statistics of a micro-batch."""
        return {ROW_TOKENS: float(self.num_row_tokens), COMPUTED_TOKENS: float(len(self.ends))}

    def to(self, device: torch.device) -> "AttentionTree":
        """Return the tree with its tensors on a device."""
        return replace(self, spans=tuple(span.to(device) for span in self.spans), ends=self.ends.to(device))

    def extended(self, num_tokens: int) -> "AttentionTree":
        """Return the tree with a segment of further tokens after it, at the start of another row."""
        start = len(self.ends)
        tokens = torch.arange(start, start + num_tokens)
        span = SequenceSpan(tokens, torch.arange(num_tokens), num_tokens)
        ends = torch.cat([self.ends, torch.full((num_tokens,), start + num_tokens)])
        segments = (*self.segments, (start, start + num_tokens, start + num_tokens))
        return AttentionTree((*self.spans, span), segments, ends, self.num_row_tokens + num_tokens)

    @functools.cached_property
    def block_mask(self) -> Any:
        """Return FlexAttention's block mask, made once for all layers."""
        from torch.nn.attention.flex_attention import create_block_mask

        size = len(self.ends)
        return create_block_mask(sees(self.ends), None, None, size, size, device=str(self.ends.device))


def sees(ends: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's mask function: a query sees the keys before it whose subtree it is in.

    In depth-first order a token is in the subtree of an earlier one if that subtree has not ended before it.
    """

    def mask(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    return mask


def path_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys (q,k) bool a path's last tokens see.

    Those are the keys before them, the last `window` if it is not None.
    """
    places = torch.arange(num_keys, device=device)
    distance = places[num_keys - num_queries :, None] - places
    is_before = distance >= 0
    return is_before if window is None else is_before & (distance < window)
