"""Micro-batches and balanced parts: every index exactly once, no limit exceeded, the promised balance."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algos.partition import balanced_partition, micro_batches
from hybridrl.errors import DataError

QUICK = settings(max_examples=150, deadline=None, derandomize=True)
LENGTHS = st.lists(st.integers(0, 60), max_size=40)


def cost(group: list[int], lengths: list[int], packed: bool) -> int:
    return sum(lengths[i] for i in group) if packed else len(group) * max(lengths[i] for i in group)


@QUICK
@given(
    lengths=LENGTHS,
    max_rows=st.none() | st.integers(1, 9),
    max_tokens=st.none() | st.integers(60, 200),
    packed=st.booleans(),
)
def test_every_row_is_in_one_group_and_no_limit_is_broken(lengths, max_rows, max_tokens, packed):
    groups = micro_batches(lengths, max_rows=max_rows, max_tokens=max_tokens, packed=packed)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for group in groups:
        assert group
        assert len(group) <= (max_rows or len(group))
        assert max_tokens is None or cost(group, lengths, packed) <= max_tokens


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_padded_groups_are_as_few_as_possible(lengths):
    def fewest(rows: tuple[int, ...]) -> int:
        if not rows:
            return 0
        first, rest = rows[0], rows[1:]
        companions = itertools.chain.from_iterable(itertools.combinations(rest, k) for k in range(len(rest) + 1))
        fitting = (c for c in companions if cost([first, *c], lengths, packed=False) <= 24)
        return 1 + min(fewest(tuple(r for r in rest if r not in c)) for c in fitting)

    assert len(micro_batches(lengths, max_tokens=24)) == fewest(tuple(range(len(lengths))))


def test_groups_worked_out_by_hand():
    lengths = [3, 10, 4, 9, 1]
    # sorted: 10, 9, 4, 3, 1. Padded, 20 tokens: 2 x 10; 3 x 4 = 12. Packed, 20 tokens: 10 + 9 + 1; 4 + 3
    assert micro_batches(lengths, max_tokens=20) == [[1, 3], [2, 0, 4]]
    assert micro_batches(lengths, max_tokens=20, packed=True) == [[1, 3, 4], [2, 0]]
    assert micro_batches(lengths, max_rows=2) == [[1, 3], [2, 0], [4]]
    assert micro_batches(lengths, max_rows=2, max_tokens=20, packed=True) == [[1, 3], [2, 0], [4]]
    assert micro_batches(lengths) == [[1, 3, 2, 0, 4]]
    assert micro_batches([5, 5, 5], max_rows=2) == [[0, 1], [2]]


def test_units_stay_together_worked_out_by_hand():
    lengths, units = [3, 10, 4, 9, 1, 2], [0, 0, 1, 1, 2, 2]
    # units by their longest row: {1, 0}, {3, 2}, {5, 4}. Padded, 24 tokens: 2 x 10; 2 x 9 (4 x 9 is too much); 2 x 2
    assert micro_batches(lengths, max_tokens=24, units=units) == [[1, 0], [3, 2], [5, 4]]
    assert micro_batches(lengths, max_tokens=40, units=units) == [[1, 0, 3, 2], [5, 4]]
    # packed, 16 tokens: 10 + 3 + 2 + 1; 9 + 4
    assert micro_batches(lengths, max_tokens=16, packed=True, units=units) == [[1, 0, 5, 4], [3, 2]]
    assert micro_batches(lengths, max_rows=3, units=torch.tensor(units)) == [[1, 0], [3, 2], [5, 4]]
    assert micro_batches(lengths, max_tokens=20, units=range(6)) == micro_batches(lengths, max_tokens=20)


def test_a_unit_over_a_limit_is_refused():
    with pytest.raises(DataError, match=r"rows \[1, 0\].* 20 tokens.* at most 19"):
        micro_batches([3, 10], max_tokens=19, units=[0, 0])
    assert micro_batches([3, 10], max_tokens=13, packed=True, units=[0, 0]) == [[1, 0]]
    with pytest.raises(DataError, match=r"rows \[1, 0\] .*at most 1 rows"):
        micro_batches([3, 10], max_rows=1, units=[0, 0])
    with pytest.raises(ValueError, match="units has 1 entries for 2 rows"):
        micro_batches([3, 10], units=[0])


def test_lengths_may_be_a_tensor_or_numpy_numbers():
    assert micro_batches(torch.tensor([3, 10, 4]), max_tokens=12) == micro_batches(
        list(np.array([3, 10, 4])), max_tokens=12
    )


@pytest.mark.parametrize("limits", [{}, {"max_rows": 2}, {"max_tokens": 5}, {"max_tokens": 5, "packed": True}])
def test_no_rows_are_no_groups(limits):
    assert micro_batches([], **limits) == []


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_over_the_budget_is_refused_with_its_length_and_the_fix(packed):
    with pytest.raises(DataError, match="row 1 .*21 tokens.* 20.*token budget"):
        micro_batches([3, 21, 20], max_tokens=20, packed=packed)
    assert micro_batches([3, 20], max_tokens=20, packed=packed) == [[1], [0]]


def test_limits_below_1_are_refused():
    with pytest.raises(ValueError, match="max_rows=0 must be at least 1"):
        micro_batches([1], max_rows=0)
    with pytest.raises(ValueError, match="max_tokens=-5 must be at least 1"):
        micro_batches([1], max_tokens=-5)


@QUICK
@given(weights=st.lists(st.integers(0, 1000), max_size=50), num_parts=st.integers(1, 9), equal_size=st.booleans())
def test_parts_hold_every_index_once_and_differ_by_no_more_than_the_largest_weight(weights, num_parts, equal_size):
    parts = balanced_partition(weights, num_parts, equal_size=equal_size)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)
    totals = [sum(weights[i] for i in part) for part in parts]
    assert max(totals) - min(totals) <= max(weights, default=0)
    sizes = [len(part) for part in parts]
    if equal_size:
        assert sizes == [len(weights) // num_parts + (p < len(weights) % num_parts) for p in range(num_parts)]
    else:
        assert totals == sorted(totals, reverse=True)


def test_largest_differencing_worked_out_by_hand():
    # 8 7 6 5 4 in two: 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2: the parts differ by 2, 16 and 14
    parts = balanced_partition([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]
    assert balanced_partition([5, 5], 3) == [[0], [1], []]
    assert balanced_partition([], 2) == [[], []]
    assert balanced_partition([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balanced_partition([9, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]


def test_real_response_lengths_are_balanced_to_a_permille_and_better_than_in_order():
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 512).astype(int).tolist()
    for equal_size in (True, False):
        totals = [sum(lengths[i] for i in part) for part in balanced_partition(lengths, 8, equal_size=equal_size)]
        in_order = [sum(lengths[start : start + 64]) for start in range(0, 512, 64)]
        assert max(totals) - min(totals) < 0.001 * max(totals)
        assert max(totals) - min(totals) < 0.01 * (max(in_order) - min(in_order))


def test_refusals_name_the_value():
    with pytest.raises(ValueError, match="num_parts=0"):
        balanced_partition([1], 0)
    with pytest.raises(ValueError, match="weight 1 is -2"):
        balanced_partition([1, -2], 2)
    with pytest.raises(ValueError, match="weight 0 is nan"):
        balanced_partition(torch.tensor([float("nan")]), 2)


def dense_differencing(weights: list[int], num_parts: int) -> list[list[int]]:
    """The method as published: every partial solution has all its parts, also the empty ones."""
    solutions = [[(weight, [i]), *[(0, [])] * (num_parts - 1)] for i, weight in enumerate(weights)]
    solutions.sort(key=lambda solution: (-solution[0][0], solution[0][1]))
    numbered = [(s[-1][0] - s[0][0], number, s) for number, s in enumerate(solutions)]
    number = len(numbered)
    while len(numbered) > 1:
        (*_, first), (*_, second), *rest = sorted(numbered, key=lambda entry: entry[:2])
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        numbered, number = [*rest, (merged[-1][0] - merged[0][0], number, merged)], number + 1
    return [sorted(indices) for _, indices in numbered[0][2]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 9))
def test_leaving_out_empty_parts_changes_no_partition(weights, num_parts):
    assert balanced_partition(weights, num_parts) == dense_differencing(weights, num_parts)
