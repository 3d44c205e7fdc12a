"""Which samples a step trains on: by hand, and equal to a search over all subsets."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algos.sample_selection import SELECTIONS, at_random, draw_rows, max_reward, max_variance, pf_ppo_weights
from hybridrl.errors import DataError


def groups(*scores: list[float]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array(scores)
    return values, np.isfinite(values)


def test_the_largest_variance_by_hand():
    # One right of four: it and a wrong one. With k = 3, {0, 1, 1} has 2/9, {0, 0.9, 1} has 0.202 and {0.9, 1, 1} 0.002.
    assert max_variance(*groups([0, 0, 0, 1]), k=2).tolist() == [[0, 3]]
    assert max_variance(*groups([1, 0.9, 0, 1]), k=3).tolist() == [[0, 2, 3]]
    # Half and half of equal counts; with an odd k one more of the high ones; equal scores: the earlier samples.
    assert max_variance(*groups([0, 1, 0, 1, 0, 1]), k=4).tolist() == [[0, 1, 2, 3]]
    assert max_variance(*groups([0, 1, 0, 1, 0, 1]), k=3).tolist() == [[0, 1, 3]]
    assert max_variance(*groups([2, 2, 2]), k=2).tolist() == [[0, 1]]


def test_the_best_of_n_by_hand():
    found = max_reward(*groups([0.1, 0.3, 0.2, 0.3], [4, 3, 2, 1]), k=2)
    assert found.tolist() == [[1, 3], [0, 1]]
    assert max_reward(*groups([5, 5, 5]), k=1).tolist() == [[0]]


@pytest.mark.parametrize("method", SELECTIONS)
def test_an_invalid_sample_is_chosen_only_if_valid_ones_are_missing(method):
    nan = float("nan")
    found = SELECTIONS[method](*groups([nan, 0, nan, 1], [nan, nan, nan, 7], [nan] * 4), k=2, seed=3)
    assert found.tolist() == [[1, 3], [0, 3], [0, 1]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_subset_has_a_larger_variance(data):
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), min_size=2, max_size=7))
    k = data.draw(st.integers(1, len(scores)))
    [found] = max_variance(*groups(scores), k=k)
    assert sorted(set(found.tolist())) == found.tolist() and len(found) == k
    best = max(np.var([scores[place] for place in subset]) for subset in itertools.combinations(range(len(scores)), k))
    assert np.var(np.array(scores)[found]) == pytest.approx(best, abs=1e-12)


def test_random_samples_depend_on_the_seed_alone_and_not_on_the_scores():
    low, high = np.zeros((40, 6)), np.arange(240.0).reshape(40, 6)
    valid = np.ones((40, 6), dtype=bool)
    assert at_random(low, valid, k=3, seed=1).tolist() == at_random(high, valid, k=3, seed=1).tolist()
    assert at_random(low, valid, k=3, seed=1).tolist() != at_random(low, valid, k=3, seed=2).tolist()
    assert set(at_random(low, valid, k=3, seed=1).ravel().tolist()) == set(range(6))


def test_pf_ppo_weights_are_those_of_verl():
    # compute_pf_ppo_reweight_data: abs(R)^p; 1 at both ends; 0.4 at the top and 0.1 else; 1e-8 more.
    scores = np.array([-3.0, 0.0, 2.0, 2.0])
    assert pf_ppo_weights(scores, method="pow").tolist() == pytest.approx(
        [9 + 1e-8, 1e-8, 4 + 1e-8, 4 + 1e-8], rel=1e-12
    )
    assert pf_ppo_weights(scores, method="pow", weight_pow=1).tolist() == pytest.approx([3, 0, 2, 2], abs=1e-7)
    assert pf_ppo_weights(scores, method="max_min").tolist() == pytest.approx([1, 0, 1, 1], abs=1e-7)
    assert pf_ppo_weights(scores, method="max_random").tolist() == pytest.approx([0.1, 0.1, 0.4, 0.4], abs=1e-7)
    with pytest.raises(DataError, match="weight_pow=1000: scores up to 3.*float64"):
        pf_ppo_weights(scores, method="pow", weight_pow=1000)


def test_rows_are_drawn_in_proportion_to_their_weights():
    weights = np.repeat([0.0, 1.0, 3.0], 4000)
    rows = draw_rows(weights, seed=5)
    assert len(rows) == 12000 and (rows >= 4000).all()
    # Expected 9000 of the last third, with a standard deviation of 47.
    assert abs(int((rows >= 8000).sum()) - 9000) < 5 * 47
    assert rows.tolist() == draw_rows(weights, seed=5).tolist() != draw_rows(weights, seed=6).tolist()
    assert draw_rows(np.zeros(0), seed=1).tolist() == []
