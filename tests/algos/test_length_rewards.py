"""Length rewards: worked out by hand."""

import pytest
import torch

from hybridrl.algos.length_rewards import length_rewards


def rewards(lengths, right, *, valid=None, group=None):
    size = len(lengths)
    return length_rewards(
        torch.tensor(lengths),
        torch.tensor(right, dtype=torch.bool),
        torch.tensor([True] * size if valid is None else valid),
        group_B=torch.tensor(group or [0] * size),
    ).tolist()


def test_right_responses_gain_or_lose_and_wrong_ones_only_lose():
    # lambda = 1/2 - (l - 10) / 40: 0.5, 0.25, -0.25, -0.5
    assert rewards([10, 20, 40, 50], [1, 1, 1, 1]) == pytest.approx([0.5, 0.25, -0.25, -0.5])
    assert rewards([10, 20, 40, 50], [0, 0, 0, 1]) == pytest.approx([0, 0, -0.25, -0.5])


def test_groups_are_compared_with_themselves_and_one_of_equal_lengths_has_none():
    found = rewards([10, 1000, 20, 1000, 7], [1] * 5, group=[3, 8, 3, 8, 5])
    assert found == pytest.approx([0.5, 0, -0.5, 0, 0])


def test_an_invalid_response_has_none_and_does_not_count():
    assert rewards([10, 20, 990], [1, 1, 1], valid=[True, True, False]) == pytest.approx([0.5, -0.5, 0])
    assert rewards([10, 20], [1, 1], valid=[False, False]) == [0, 0]
