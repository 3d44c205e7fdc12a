"""The code example: its tests fit its programs, test questions are new, and its training runs in a sandbox."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples.code_task.make_data import write_all
from reward_score.code import extract_code
from tests.support.end_to_end.runs import metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("code_task")
    write_all(folder, seed=1, num_test=100, num_demonstrations=300)
    return folder


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_the_tests_of_a_row_are_those_of_its_program(data):
    for row in rows(data / "test.parquet"):
        names: dict = {}
        exec(extract_code(row["extra_info"]["answer"]), names)
        truth = json.loads(row["reward_model"]["ground_truth"])
        assert [names["f"](*values) for values in truth["inputs"]] == truth["outputs"]


def test_no_question_of_the_test_is_trained_on(data):
    held_out = {row["prompt"][0]["content"] for row in rows(data / "test.parquet")}
    trained = {row["prompt"][0]["content"] for row in rows(data / "train.parquet")}
    shown = {row["messages"][0]["content"] for row in rows(data / "sft_train.parquet")}
    assert len(held_out) == 100 and not held_out & (trained | shown)


def test_demonstrations_are_programs_and_some_are_wrong(data):
    answers = {row["prompt"][0]["content"]: row["extra_info"]["answer"] for row in rows(data / "train.parquet")}
    shown = [[message["content"] for message in row["messages"]] for row in rows(data / "sft_train.parquet")]
    assert all(extract_code(answer).startswith("def f(a, b, c):") for _, answer in shown)
    right = sum(answers[question] == answer for question, answer in shown)
    assert 0.2 * len(shown) < right < 0.6 * len(shown)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_the_example_runs(tmp_path, backend):
    sizes = {
        "SFT_STEPS": "20",
        "STEPS": "2",
        "BATCH": "2",
        "NUM_TEST": "4",
        "BACKEND": backend,
        "PYTHON": sys.executable,
    }
    command = ["bash", "examples/code_task/run.sh", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **sizes}, timeout=880, check=True)
    [first, *_, last] = metrics(tmp_path / "out" / "grpo")
    assert last["step"] == 2
    assert all(row.get("reward/num_failed", 0) == 0 for row in (first, last))
