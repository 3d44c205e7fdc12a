from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.master.health.stragglers import NUM_CALLS, StragglerDetector, compare_with_peers


def ranks(*medians, method="rollout.generate"):
    return {f"rollout-{rank}": {method: [seconds] * NUM_CALLS} for rank, seconds in enumerate(medians)}


def test_a_process_that_takes_1_5_times_as_long_as_its_peers_is_named_with_figures():
    [warning] = StragglerDetector().new_findings(compare_with_peers(ranks(1.0, 1.7, 1.1)))
    assert warning.slot == "rollout-1"
    assert warning.text.startswith(
        "it is slow: rollout.generate took 1.70 s (median of its last 10 calls), and 1.05 s for its 2 "
        "peers, 1.6 times as long"
    )


@pytest.mark.parametrize(
    "seconds",
    [
        ranks(1.0, 1.4),  # not slow enough
        ranks(0.1, 0.55),  # too small a difference
        ranks(5.0),  # no peers
        {
            "rollout-0": {"rollout.generate": [1.0] * NUM_CALLS},
            "rollout-1": {"rollout.generate": [9.0] * (NUM_CALLS - 1)},
        },  # not often enough
        {
            "rollout-0": {"rollout.generate": [1.0] * NUM_CALLS},
            "rollout-1": {"rollout.generate": [1.0] * 6 + [9.0] * 4},
        },  # not regularly
        {
            "rollout-0": {"rollout.generate": [1.0] * NUM_CALLS},
            "rollout-1": {"rollout.sleep": [9.0] * NUM_CALLS},
        },  # another method
        {"rollout-0": {"x.generate": [1.0] * NUM_CALLS}, "actor-0": {"x.generate": [9.0] * NUM_CALLS}},  # another role
    ],
)
def test_no_process_is_named_without_reason(seconds):
    assert StragglerDetector().new_findings(compare_with_peers(seconds)) == []


def test_a_straggler_is_reported_once_and_again_only_if_it_was_fast_in_between():
    detector = StragglerDetector()
    reported = [
        len(detector.new_findings(compare_with_peers(ranks(1.0, slow)))) for slow in (2.0, 2.5, 1.4, 2.0, 1.1, 2.0)
    ]
    assert reported == [1, 0, 0, 0, 0, 1]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_the_peers_median_is_that_of_all_others(medians):
    for rank, found in enumerate(compare_with_peers(ranks(*medians))):
        assert found.peers_s == pytest.approx(median(medians[:rank] + medians[rank + 1 :]))
