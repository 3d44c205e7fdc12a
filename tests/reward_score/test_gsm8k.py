"""GSM8K's score function, by hand and on the dataset's own solutions."""

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from reward_score import gsm8k

DATA = Path(os.environ.get("HYBRIDRL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so #### 18", "18"),
        ("####18", "18"),
        ("#### $1,234.50 a day", "1234.50"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### 18.", "18"),
        ("#### .5", ".5"),
        ("#### 3 no, #### 4", "4"),
        ("#### 3, I mean #### five", None),
        ("#### five", None),
        ("####\n7", None),
        ("the answer is 18", None),
        ("#### --5", None),
        ("#### +$-5", None),
        ("", None),
    ],
)
def test_strict_takes_the_number_after_the_last_mark(text, answer):
    assert gsm8k.extract_solution(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("first 3, then 1,000 apples.", "1000"),
        ("#### 7 of 9", "9"),
        ("from 3 to -4.5!", "-4.5"),
        ("version 1.2.3", "1.2"),
        ("none", None),
    ],
)
def test_flexible_takes_the_last_number(text, answer):
    assert gsm8k.extract_solution(text, method="flexible") == answer


@pytest.mark.parametrize(
    ("text", "truth"),
    [("#### 18.0", "18"), ("#### $70,000", "70000"), ("#### 5", 5), ("#### 1000", "1,000"), ("#### +3", "3")],
)
def test_equal_numbers_score_one_however_they_are_written(text, truth):
    assert gsm8k.compute_score(text, truth) == 1.0


def test_wrong_number_gets_format_score_and_no_number_gets_zero():
    assert gsm8k.compute_score("#### 4", "5") == 0.0
    assert gsm8k.compute_score("#### 4", "5", format_score=0.1, score=2.0) == 0.1
    assert gsm8k.compute_score("#### 5", "5", format_score=0.1, score=2.0) == 2.0
    assert gsm8k.compute_score("four", "5", format_score=0.1) == 0.0
    assert gsm8k.compute_score("#### --5", "5") == 0.0  # wrong, and not an error that would mask the sample


def test_a_prefix_of_the_right_number_is_wrong():
    assert gsm8k.compute_score("#### 18", "180") == 0.0
    assert gsm8k.compute_score("#### 180", "18") == 0.0


def test_ground_truth_that_is_no_number_and_unknown_method_are_refused():
    with pytest.raises(ValueError, match="ground_truth='many'"):
        gsm8k.compute_score("#### 5", "many")
    with pytest.raises(ValueError, match="method='loose'"):
        gsm8k.extract_solution("#### 5", method="loose")


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_reference_solution_scores_one_and_the_next_number_zero(split):
    path = DATA / f"gsm8k_{split}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}; set HYBRIDRL_DATA to the directory of the raw data")
    solutions = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(solutions) == {"train": 7473, "test": 1319}[split]
    for solution in solutions:
        truth = solution.rsplit("####", 1)[1].strip()
        wrong = str(Decimal(truth.replace(",", "")) + 1)
        assert gsm8k.compute_score(solution, truth) == 1.0
        assert gsm8k.compute_score(solution, wrong) == 0.0
        assert gsm8k.compute_score(solution, truth, method="flexible") == 1.0
