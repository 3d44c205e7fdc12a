"""Geometry3K: the share of the answer and that of the format."""

import pytest

from reward_score import default_compute_score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>2 + 1</think> \boxed{3}", 1.0),
        (r"\boxed{3}", 0.9),
        (r"<think>2 + 2</think> \boxed{4}", 0.1),
        (r"3", 0.0),
        (r"\boxed{3} <think>after</think>", 0.9),
    ],
)
def test_a_right_box_is_worth_nine_tenths_and_thoughts_before_it_one_tenth(response, score):
    assert default_compute_score("hiyouga/geometry3k", response, "3") == pytest.approx(score)
