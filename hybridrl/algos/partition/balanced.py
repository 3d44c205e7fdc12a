"""Split rows into micro-batches, and distribute rows over ranks.

Both functions take lengths or weights and return row indices; they move no data. Both are deterministic: equal inputs
give equal results in every process.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from hybridrl.errors import DataError

Numbers = Sequence[float] | torch.Tensor
FEW_PARTS = 8
"""So many parts are inserted into a sorted list one by one; more are sorted with it."""


def micro_batches(
    lengths: Sequence[int] | torch.Tensor,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    packed: bool = False,
    units: Sequence[int] | torch.Tensor | None = None,
) -> list[list[int]]:
    """Return groups of row indices; the first group has the longest rows.

    Each row is in exactly one group.

    The cost of a group is what is computed. In the padded layout it is rows x longest row. Rows are sorted by length,
    so padding is small and the number of groups is minimal. If `packed` it is the sum of lengths (first-fit decreasing:
    a few more groups than the minimum). The longest rows come first, so that memory runs out at once or not at all.
    Groups are not balanced between ranks: ranks may have different numbers of groups.

    Args:
        max_rows: Largest number of rows of a group. None is no limit.
        max_tokens: Largest cost of a group. None is no limit; without any limit there is one group.
        units: Number of the unit of each row. Rows of one unit, such as the two answers of a pair, stay together.

    Raises:
        DataError: A single unit costs more than `max_tokens`, or has more rows than `max_rows`.
        ValueError: A limit is below 1.
    """
    for name, limit in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit} must be at least 1")
    lengths = _plain(lengths)
    members = _members(lengths, range(len(lengths)) if units is None else _plain(units))
    rows, tokens = max_rows or len(lengths), math.inf if max_tokens is None else max_tokens
    for unit in members:
        check_fits(unit, lengths, rows, tokens, packed=packed)
    return _first_fit(members, lengths, rows, tokens) if packed else _padded_runs(members, lengths, rows, tokens)


def _members(lengths: list[int], units: Sequence[int]) -> list[list[int]]:
    """Return the rows of each unit, longest row first; the unit with the longest row first."""
    if len(units) != len(lengths):
        raise ValueError(f"units has {len(units)} entries for {len(lengths)} rows")
    members: dict[int, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        members.setdefault(units[row], []).append(row)
    return list(members.values())


def check_fits(unit: list[int], lengths: list[int], max_rows: int, max_tokens: float, *, packed: bool) -> None:
    """Raise DataError if the rows of a unit, longest first, exceed the limits of a micro-batch."""
    cost = sum(lengths[row] for row in unit) if packed else len(unit) * lengths[unit[0]]
    if cost > max_tokens:
        what = f"row {unit[0]} has" if len(unit) == 1 else f"rows {unit}, which stay together, have"
        raise DataError(
            f"{what} {cost} tokens, but a micro-batch may have at most {max_tokens}: "
            "raise the token budget (..max_token_len_per_gpu) or lower the prompt and response length limits"
        )
    if len(unit) > max_rows:
        raise DataError(
            f"rows {unit} stay together, but a micro-batch may have at most {max_rows} rows: raise "
            "..micro_batch_size_per_gpu"
        )


def balanced_partition(weights: Numbers, num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Return `num_parts` lists of indices with nearly equal total weight.

    Each index is in exactly one list, ascending. Largest differencing (Karmarkar and Karp, "The differencing method of
    set partitioning", UCB/CSD 82/113, 1982): the heaviest and the lightest part differ by at most the largest weight.

    Args:
        equal_size: The parts' sizes differ by at most one, larger parts first (as in `DataProto.chunk_uneven`). Swaps
            reduce the imbalance that fixed sizes cause. Otherwise sizes are free, the heaviest part is first, and parts
            may be empty if there are fewer indices than parts.

    Raises:
        ValueError: num_parts is below 1, or a weight is negative or not finite.
    """
    weights = _plain(weights)
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts} must be at least 1")
    return list(map(list, _partition(tuple(weights), num_parts, equal_size)))


@lru_cache(maxsize=4)  # a step distributes the same lengths for several calls
def _partition(weights: tuple[float, ...], num_parts: int, equal_size: bool) -> list[list[int]]:
    """Return the parts of `balanced_partition`; not to be changed."""
    for index, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight {index} is {weight}; weights must be finite and not negative")
    order = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    if len(weights) <= num_parts and not equal_size:  # what the merges below lead to
        return [[index] for index in order] + [[]] * (num_parts - len(order))
    hand_size = num_parts if equal_size else 1
    hands = [order[start : start + hand_size] for start in range(0, len(order), hand_size)]
    parts = [(-total, indices) for total, indices in _differenced([_deal(hand, weights) for hand in hands], num_parts)]
    if equal_size:
        parts = sorted(
            _swapped_while_better(parts, weights), key=lambda part: (-len(part[1]), -part[0], sorted(part[1]))
        )
    return [sorted(indices) for _, indices in parts]


def _plain(numbers: Numbers) -> list:
    return (
        numbers.tolist()
        if isinstance(numbers, torch.Tensor)
        else [n.item() if hasattr(n, "item") else n for n in numbers]
    )


def _padded_runs(units: Iterable[list[int]], lengths: list[int], max_rows: int, max_tokens: float) -> list[list[int]]:
    """Split units sorted by decreasing length into groups; all rows are padded to a group's first row."""
    groups: list[list[int]] = []
    for unit in units:
        size = len(groups[-1]) + len(unit) if groups else 0
        if groups and size <= max_rows and size * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].extend(unit)
        else:
            groups.append(list(unit))
    return groups


def _first_fit(units: Iterable[list[int]], lengths: list[int], max_rows: int, max_tokens: float) -> list[list[int]]:
    """Put each unit, by decreasing length, into the first group that can hold it."""
    groups: list[list[int]] = []
    remaining: list[float] = []
    for unit in units:
        cost = sum(lengths[row] for row in unit)
        fits = (g for g, free in enumerate(remaining) if cost <= free and len(groups[g]) + len(unit) <= max_rows)
        group = next(fits, len(groups))
        if group == len(groups):
            groups.append([])
            remaining.append(max_tokens)
        groups[group].extend(unit)
        remaining[group] -= cost
    return groups


Part = tuple[float, list[int]]
"""A part's total weight and its indices."""
Solution = list[Part]
"""Parts with indices, heaviest first. Totals are negative, so that tuples sort without a key: 4 times as fast."""


def _deal(hand: list[int], weights: Sequence[float]) -> Solution:
    return [(-weights[index], [index]) for index in hand]


def _differenced(solutions: list[Solution], num_parts: int) -> Solution:
    """Merge the two most uneven partial solutions, heaviest part with lightest, until one is left.

    Parts without indices are left out of the lists: most merges are of few parts, whatever `num_parts` is.
    """

    def negative_spread(solution: Solution) -> float:
        return solution[0][0] - (solution[-1][0] if len(solution) == num_parts else 0)

    # The running number breaks ties, so that the order never depends on comparing parts.
    heap = [(negative_spread(solution), number, solution) for number, solution in enumerate(solutions)]
    heapq.heapify(heap)
    for number in range(len(solutions), 2 * len(solutions) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merged(first, second, num_parts)
        heapq.heappush(heap, (negative_spread(merged), number, merged))
    parts = heap[0][2] if heap else []
    return parts + [(0, [])] * (num_parts - len(parts))


def _merged(first: Solution, second: Solution, num_parts: int) -> Solution:
    """Return one partial solution: part i of the first with part num_parts - 1 - i of the second."""
    alone, other_alone = max(0, num_parts - len(second)), max(0, num_parts - len(first))
    pairs = zip(first[alone:], reversed(second[other_alone:]), strict=True)
    merged, more = first[:alone], second[:other_alone]
    if len(merged) < len(more):
        merged, more = more, merged
    more += [(a + b, left + right) for (a, left), (b, right) in pairs]
    if len(more) > FEW_PARTS:
        return sorted(merged + more)
    for part in more:
        insort(merged, part)
    return merged


def _swapped_while_better(parts: list[Part], weights: Sequence[float]) -> list[Part]:
    """Swap an index of the heaviest part with one of the lightest while this reduces their difference."""
    parts = [(total, sorted(indices, key=lambda index: (weights[index], index))) for total, indices in parts]
    for _ in weights:  # each swap lowers the sum of squares; the bound prevents cycles by rounding
        heavy, light = max(parts, key=lambda part: part[0]), min(parts, key=lambda part: part[0])
        swap = _best_swap(heavy, light, weights)
        if swap is None:
            break
        out, back = swap
        parts[parts.index(heavy)] = _exchanged(heavy, out, back, weights)
        parts[parts.index(light)] = _exchanged(light, back, out, weights)
    return parts


def _best_swap(heavy: Part, light: Part, weights: Sequence[float]) -> tuple[int, int] | None:
    """Return the pair whose weights differ by nearly half the gap between the parts.

    None if no pair narrows the gap.
    """
    half_gap, light_weights = (heavy[0] - light[0]) / 2, [weights[index] for index in light[1]]
    best: tuple[float, int, int] | None = None
    for out in heavy[1]:
        at = bisect_left(light_weights, weights[out] - half_gap)
        for back in light[1][max(at - 1, 0) : at + 1]:
            miss = abs(weights[out] - weights[back] - half_gap)
            if miss < (best[0] if best else half_gap):
                best = miss, out, back
    return best and best[1:]


def _exchanged(part: Part, out: int, into: int, weights: Sequence[float]) -> Part:
    indices = [index for index in part[1] if index != out] + [into]
    return part[0] - weights[out] + weights[into], sorted(indices, key=lambda index: (weights[index], index))
