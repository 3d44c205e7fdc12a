"""The choice of a short round is that of whole responses, whatever the limits at which it is made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.serving.agent_loop.short_round import NUM_LIMITS, round_limits, shortest_groups


@pytest.mark.parametrize("max_tokens", [1, 5, 16, 17, 8192])
def test_the_limits_rise_to_the_whole_length(max_tokens):
    limits = round_limits(max_tokens)
    steps = {stop - start for start, stop in zip([0, *limits], limits, strict=False)}
    assert limits[-1] == max_tokens and len(limits) == min(NUM_LIMITS, max_tokens)
    assert max(steps) - min(steps) <= 1 and min(steps) >= 1


@given(
    groups=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12),
    share=st.floats(0, 1),
    ends_are_seen_at_once=st.booleans(),
)
def test_the_chosen_groups_are_the_shortest_of_whole_responses(groups, share, ends_are_seen_at_once):
    lengths, num_groups = [length for group in groups for length in group], 1 + int(share * (len(groups) - 1))
    by_length = sorted((max(group), place) for place, group in enumerate(groups))
    for limit in round_limits(40):
        # A batched call cannot tell a response that ends in its last column from one that goes on.
        bound = limit + 1 if ends_are_seen_at_once or limit == 40 else limit
        known = [length if length < bound else None for length in lengths]
        chosen = shortest_groups(known, n=2, num_groups=num_groups, limit=limit)
        if chosen is not None:
            break
    assert chosen == sorted(place for _, place in by_length[:num_groups])


def test_a_response_that_a_tool_has_made_longer_than_the_limit_does_not_count_yet():
    assert shortest_groups([9, None], n=1, num_groups=1, limit=4) is None
    assert shortest_groups([9, 8], n=1, num_groups=1, limit=8) == [1]
