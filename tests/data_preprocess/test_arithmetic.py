"""The quick start's word problems: right solutions, three annotators, no test question in training."""

import random
import re

import pyarrow.parquet as pq
import pytest

from data_preprocess import arithmetic

SIZES = {"train": 300, "test": 100, "sft_train": 2000, "sft_val": 50}
CALCULATION = re.compile(r"<<(\d+)([-+*])(\d+)=(\d+)>>")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("arithmetic")
    flags = [text for name, size in SIZES.items() for text in (f"--num_{name}", str(size))]
    assert arithmetic.main(["--local_dir", str(directory), "--seed", "3", *flags]) == 0
    return {name: pq.read_table(directory / f"{name}.parquet").to_pylist() for name in SIZES}


def result(left: str, sign: str, right: str) -> int:
    return {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]


def questions(rows: list[dict]) -> list[str]:
    return [row["messages"][0]["content"] if "messages" in row else row["prompt"][0]["content"] for row in rows]


def test_every_file_has_the_rows_asked_for_and_no_question_occurs_twice_anywhere(written):
    assert {name: len(rows) for name, rows in written.items()} == SIZES
    everything = [question for rows in written.values() for question in questions(rows)]
    assert len(set(everything)) == sum(SIZES.values())


def test_a_solution_is_in_gsm8k_form_and_its_calculations_are_right(written):
    for row in written["train"] + written["test"]:
        solution = row["extra_info"]["answer"]
        calculations = CALCULATION.findall(solution)
        assert re.fullmatch(r"<<\S+>>( <<\S+>>)? #### \d+", solution) and 1 <= len(calculations) <= 2
        assert all(result(a, sign, b) == int(c) for a, sign, b, c in calculations)
        assert row["reward_model"] == {"style": "rule", "ground_truth": calculations[-1][3]}
        assert solution.endswith(f"#### {calculations[-1][3]}")
        assert 0 <= int(calculations[-1][3]) <= 60


def test_a_problem_worked_out_by_hand():
    words, plan = arithmetic.TEMPLATES[12]
    problem = arithmetic.fill_in(words, plan, random.Random(0))
    a, b, c = problem.numbers
    assert f"buys {a} boxes of {b}" in problem.question and f"finds {c} more" in problem.question
    careful, adder = (arithmetic.demonstrate(problem, name, random.Random(0)) for name in ("careful", "adder"))
    assert careful == f"<<{a}*{b}={a * b}>> <<{a * b}+{c}={a * b + c}>> #### {a * b + c}"
    assert adder == f"<<{a}+{b}={a + b}>> <<{a + b}+{c}={a + b + c}>> #### {a + b + c}"


def test_the_annotators_do_a_quarter_a_half_and_a_quarter_of_the_demonstrations(written):
    names = [row["annotator"] for row in written["sft_train"]]
    # 2000 draws: the standard deviation of a share is at most sqrt(0.25 / 2000) = 0.011
    assert {name: names.count(name) / len(names) for name in set(names)} == pytest.approx(
        arithmetic.ANNOTATORS, abs=0.045
    )


def test_every_annotator_calculates_right_and_the_adder_only_adds(written):
    answers = [row["messages"][1]["content"] for row in written["sft_train"]]
    calculations = [found for answer in answers for found in CALCULATION.findall(answer)]
    assert len(calculations) > len(answers) and all(result(a, sign, b) == int(c) for a, sign, b, c in calculations)
    adders = [answer for answer, row in zip(answers, written["sft_train"], strict=True) if row["annotator"] == "adder"]
    assert all(sign == "+" for answer in adders for _, sign, _, _ in CALCULATION.findall(answer))


def test_the_same_seed_writes_the_same_rows_and_another_seed_others(tmp_path):
    def make(name: str, seed: int) -> list[dict]:
        flags = ["--num_train", "20", "--num_test", "5", "--num_sft_train", "20", "--num_sft_val", "5"]
        assert arithmetic.main(["--local_dir", str(tmp_path / name), "--seed", str(seed), *flags]) == 0
        return [pq.read_table(path).to_pylist() for path in sorted((tmp_path / name).iterdir())]

    assert make("a", 1) == make("b", 1)
    assert make("a", 1) != make("c", 2)


def test_more_problems_than_there_are_and_no_problems_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        arithmetic, "TEMPLATES", (("{name} has {a} {item} and {b} {item}. How many {item} is that?", "a+b"),)
    )
    # 16 names x 16 items x 25 pairs of numbers = 6400 problems
    assert arithmetic.main(["--local_dir", str(tmp_path), "--num_train", "6500", "--num_test", "1"]) == 2
    assert "do not give more than" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        arithmetic.main(["--local_dir", str(tmp_path), "--num_train", "0"])
    assert stopped.value.code == 2
