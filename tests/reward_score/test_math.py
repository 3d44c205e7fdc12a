"""The score functions of competition mathematics, by hand and on the MATH test split's own solutions."""

import json
import os
import threading
from pathlib import Path

import pytest

from reward_score import math, math_dapo

DATA = Path(os.environ.get("HYBRIDRL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="module")
def solutions():
    path = DATA / "math_test.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}; set HYBRIDRL_DATA to the directory of the raw data")
    return [json.loads(line)["solution"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {7}", "7"),
        (r"$\boxed 7$", "7"),
        (r"$\boxed\pi$", r"\pi"),
        (r"\fbox{9}", "9"),
        (r"\boxed{1} \boxed{2", None),
        ("42", None),
        (r"\boxed", None),
    ],
)
def test_last_boxed_balances_braces(text, answer):
    assert math.last_boxed(text) == answer


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\frac12", "0.5"),
        (r"\frac{1}{2}", r"\dfrac{2}{4}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("5,000", "5000"),
        (r"\text{(C)}", "C"),
        ("1,2", "2,1"),
        ("5", "x=5"),
        (r"90^\circ", "90"),
        (r"50\%", r"50 \%"),
        (r"50\%", r"\text{50\%}"),
        (r"12.5\%", r"12.50\%"),
        ("10", r"10\%"),  # MATH's own scorer drops the sign: some of its answers in percent have it, others do not
    ],
)
def test_equal_mathematics_scores_one(truth, answer):
    assert math.compute_score(rf"thus \boxed{{{answer}}}", truth) == 1.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("2", "3"),
        ("10", r"0.1\%"),
        (r"\%", "%"),
        ("[1,3)", "[1,3]"),
        (r"\text{even}", r"\text{odd}"),
        ("x+1", "x+2"),
        ("2", ""),
        ("", ""),
        ("2", r"\f"),
    ],
)
def test_other_mathematics_scores_zero(truth, answer):
    assert math.compute_score(rf"thus \boxed{{{answer}}}", truth) == 0.0


def test_right_number_outside_a_box_scores_zero():
    assert math.compute_score("the answer is 2", "2") == 0.0


def test_ground_truth_may_be_a_whole_solution():
    assert math.compute_score(r"\boxed{0.5}", r"We halve and get $\boxed{\frac{1}{2}}$.") == 1.0


def test_it_works_outside_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(math.compute_score(r"\boxed{0.25}", r"\frac14")))
    thread.start()
    thread.join(timeout=60)
    assert scores == [1.0]


def test_every_reference_solution_scores_one(solutions):
    assert len(solutions) == 5000
    assert all(math.compute_score(solution, math.last_boxed(solution)) == 1.0 for solution in solutions)


def test_reference_answers_are_equal_to_themselves_as_mathematics_and_not_to_the_next(solutions):
    answers = [math.last_boxed(solution) for solution in solutions][::25]  # 200 answers: a second or two
    assert all(
        math.equal(f"{answer} ", answer) for answer in answers
    )  # the space keeps it from being equal letter by letter
    assert not [pair for pair in zip(answers, answers[1:], strict=False) if pair[0] != pair[1] and math.equal(*pair)]


@pytest.mark.parametrize(
    ("text", "pred", "score"),
    [
        ("Steps.\nAnswer: 34", "34", 1.0),
        ("Answer: 33\nAnswer: $34$.", "34", 1.0),
        ("**Answer:** 35", "35", -1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        (r"so \boxed{34}", "34", 1.0),
        ("34", None, -1.0),
        ("Answer:\n34", "34", 1.0),
        ("Answer: **34**.", "34", 1.0),
        ("**Final Answer:**\n\\boxed{34}", "34", 1.0),
        ("Answer:\n\\[\n\\boxed{34}\n\\]", "34", 1.0),
        ("Answer:\n$$\n34\n$$", "34", 1.0),
        ("## Final answer:\n\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nFinal answer:\n", "34", 1.0),
        (r"so \boxed{34}. Answer: **.**", "34", 1.0),
        ("Answer: .34", ".34", -1.0),
    ],
)
def test_dapo_scores_the_answer_line(text, pred, score):
    result = math_dapo.compute_score(text, "34")
    assert result["score"] == score and result["acc"] is (score > 0)
    assert result["pred"] == pred
