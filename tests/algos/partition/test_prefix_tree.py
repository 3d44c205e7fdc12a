"""Prefix trees and their micro-batches, in numbers worked out by hand."""

import numpy as np
import pytest

from hybridrl.algos.partition.prefix_tree import (
    balanced_tree_parts,
    common_length,
    prefix_groups,
    prefix_tree,
    tree_micro_batches,
    tree_size,
)
from hybridrl.errors import DataError


def row(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int64)


def segments(*texts: str, min_shared: int = 2) -> list[tuple[int, int, int, int]]:
    tree = prefix_tree([row(text) for text in texts], min_shared=min_shared)
    return [(part.start, part.stop, part.depth, part.end) for part in tree.segments]


def test_common_length_counts_equal_first_tokens():
    pairs = [("abc", "abd"), ("abc", "abc"), ("ab", "abc"), ("", "abc"), ("xbc", "abc")]
    assert [common_length(row(one), row(other)) for one, other in pairs] == [2, 3, 2, 0, 0]


def test_rows_that_share_a_prefix_are_children_of_one_segment():
    # abcd once, then 12, 345 and the rest of nothing: the third row is the prompt alone
    assert segments("abcd12", "abcd345") == [(0, 4, 0, 9), (4, 6, 4, 6), (6, 9, 4, 9)]
    tree = prefix_tree([row("abcd12"), row("abcd345"), row("abcd")], min_shared=2)
    assert [place.tolist() for place in tree.places] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7, 8], [0, 1, 2, 3]]
    assert tree.num_tokens == 9


def test_turns_of_a_conversation_nest():
    # abcd | 12 | xy and zz; then 34 below abcd. abcd's subtree is everything, 12's ends before 34.
    assert segments("abcd12xy", "abcd12zz", "abcd34") == [
        (0, 4, 0, 12),
        (4, 6, 4, 10),
        (6, 8, 6, 8),
        (8, 10, 6, 10),
        (10, 12, 4, 12),
    ]


def test_rows_branch_only_where_they_share_enough_since_the_last_branch():
    # abcd1 is shared, but only one token of it since the branch after abcd: 1 is computed twice
    assert segments("abcd12", "abcd99", "abcd98") == [(0, 4, 0, 10), (4, 6, 4, 6), (6, 8, 4, 8), (8, 10, 4, 10)]
    assert segments("ax", "ay") == [(0, 2, 0, 2), (2, 4, 0, 4)]


def test_rows_without_a_common_prefix_stay_apart_and_equal_rows_are_one():
    assert segments("abc", "xyz") == [(0, 3, 0, 3), (3, 6, 0, 6)]
    assert segments("abc", "abc", "abc") == [(0, 3, 0, 3)]
    assert prefix_tree([]).num_tokens == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_row_finds_its_tokens_in_the_tree_and_sees_no_others(seed):
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 2, draw.integers(0, 12)) for _ in range(30)]
    order = [number for group in prefix_groups(rows, min_shared=2) for number in group]
    tree = prefix_tree([rows[number] for number in order], min_shared=2)
    ids, ends = np.full(tree.num_tokens, -1), np.zeros(tree.num_tokens, dtype=int)
    for number, place in zip(order, tree.places, strict=True):
        assert (np.diff(place) > 0).all()
        assert ((ids[place] == -1) | (ids[place] == rows[number])).all()
        ids[place] = rows[number]
    for part in tree.segments:
        ends[part.start : part.stop] = part.end
    for place in tree.places:
        for query in place:  # the tokens before it in depth-first order whose subtree it is in are those of its row
            seen = [key for key in range(query + 1) if query < ends[key]]
            assert seen == place[place <= query].tolist()
    assert [part.stop for part in tree.segments][:-1] == [part.start for part in tree.segments][1:]


def test_groups_are_rows_with_a_common_prefix_wherever_they_are():
    rows = [row(text) for text in ("abc1", "xyz", "abc2", "xyw", "q")]
    groups = prefix_groups(rows, min_shared=2)
    assert sorted(sorted(group) for group in groups) == [[0, 2], [1, 3], [4]]


PROMPTS = [row(prompt + answer) for prompt in ("aaaaaaaa", "bbbbbbbb") for answer in ("1", "22", "333", "4444")]
"""Two prompts of 8 tokens; their trees have 8 + 1 + 2 + 3 + 4 = 18 tokens, their rows 42."""


def test_rows_of_one_prompt_stay_in_one_micro_batch():
    # separate rows would need 42 tokens for each prompt, and the budget holds both trees in two micro-batches
    assert [sorted(group) for group in tree_micro_batches(PROMPTS, max_tokens=20)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(tree_micro_batches(PROMPTS, max_tokens=36)) == 1
    assert len(tree_micro_batches(PROMPTS)) == 1


@pytest.mark.parametrize(("rows", "tokens"), [(None, 13), (None, 12), (3, None), (1, None), (2, 15), (5, 30)])
def test_limits_hold_for_trees_and_every_row_is_in_one_micro_batch(rows, tokens):
    found = tree_micro_batches(PROMPTS, max_rows=rows, max_tokens=tokens)
    assert sorted(number for group in found for number in group) == list(range(8))
    for group in found:
        assert len(group) <= (rows or 8)
        assert prefix_tree([PROMPTS[number] for number in group]).num_tokens <= (tokens or 100)


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_for_random_rows(seed):
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 2, draw.integers(0, 16)) for _ in range(40)]
    for group in tree_micro_batches(rows, max_rows=9, max_tokens=24, min_shared=3):
        members = [rows[number] if len(rows[number]) else np.zeros(1, dtype=int) for number in group]
        assert prefix_tree(members, min_shared=3).num_tokens <= 24 and len(group) <= 9


def test_a_row_above_the_budget_is_refused():
    with pytest.raises(DataError, match="row 3 has 12 tokens.* at most 11"):
        tree_micro_batches(PROMPTS, max_tokens=11)


def test_ranks_get_whole_prompts_unless_there_are_too_few():
    assert balanced_tree_parts(PROMPTS, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # one prompt for two ranks: apart is better than an idle rank
    parts = balanced_tree_parts(PROMPTS[:4], 2)
    assert sorted(number for part in parts for number in part) == [0, 1, 2, 3]
    assert max(tree_size(PROMPTS, part) for part in parts) < 18
