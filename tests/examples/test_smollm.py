"""The examples with SmolLM2: data, reward, and every command of their scripts, with a tiny model in a GGUF file."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from data_preprocess import gsm8k
from examples.gsm8k_smollm import make_sft_data
from examples.smollm import make_data
from examples.smollm.reward import compute_score, last_number
from tests.support.gguf_file import write_gguf

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500.0  # of a script: about ten starts of a program


@pytest.fixture(scope="module")
def environment(tmp_path_factory, tiny_qwen2) -> dict[str, str]:
    """Variables with which a script trains a tiny model instead of SmolLM2."""
    folder = tmp_path_factory.mktemp("gguf")
    model = write_gguf(folder / "tiny.gguf", AutoTokenizer.from_pretrained(tiny_qwen2))
    return os.environ | {"MODEL": str(model), "HF_HOME": str(folder / "home"), "PYTHON": sys.executable}


def script(name: str, *words: object, environment: dict[str, str]) -> str:
    """Run the script of an example and return its output."""
    done = subprocess.run(
        ["bash", f"examples/{name}/run.sh", *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Ben has 6 - 2 = 4 toys.", 4),
        ("It is 6-2", 2),
        ("from 5 to -3", -3),
        ("1,200.50 dollars", 1200.5),
        ("four", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text_is_read(text, number):
    assert last_number(text) == number


def test_only_the_last_number_is_rewarded():
    assert compute_score("word_problems", "4 + 3 = 7. The answer is 7.0", "7") == 1.0
    assert compute_score("word_problems", "7 is 4 + 3", "7") == 0.0
    assert compute_score("word_problems", "I do not know", "7") == 0.0


def test_no_question_is_both_trained_and_tested_and_seeds_differ(tmp_path):
    for seed in (1, 2):
        assert make_data.main(["--local_dir", str(tmp_path / str(seed)), "--seed", str(seed)]) == 0
    rows = {split: pq.read_table(tmp_path / "1" / f"{split}.parquet").to_pylist() for split in make_data.SIZES}
    asked = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert {split: len(questions) for split, questions in asked.items()} == make_data.SIZES
    assert not asked["train"] & asked["test"]
    assert all(question.endswith(make_data.INSTRUCTION) for question in asked["train"])
    assert pq.read_table(tmp_path / "2" / "test.parquet").to_pylist() != rows["test"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_script_trains_a_gguf_file_and_draws_the_run(tmp_path, environment):
    short = ("data.val_max_samples=4", "data.max_prompt_length=200", "data.max_response_length=8")
    out = script("smollm", tmp_path, *short, "trainer.total_training_steps=1", environment=environment)
    assert f"{environment['MODEL']}: converting it to float32 in {environment['HF_HOME']}" in out
    assert "validation  word_problems  reward mean@2" in out
    assert (tmp_path / "learning_curve.png").stat().st_size > 10_000


def test_a_solution_becomes_a_conversation_without_calculator_marks():
    row = {
        "prompt": [{"role": "user", "content": "How many?"}],
        "extra_info": {"answer": "3*4=<<3*4=12>>12 pens\n#### 12"},
    }
    assert make_sft_data.to_conversation(row)["messages"] == [
        *row["prompt"],
        {"role": "assistant", "content": "3*4=12 pens\n#### 12"},
    ]


def test_without_data_the_command_that_makes_them_is_named(tmp_path, capsys):
    assert make_sft_data.main(["--data", str(tmp_path)]) == 2
    assert "python -m data_preprocess.gsm8k --local_dir" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_gsm8k_is_measured_fine_tuned_and_reinforced_by_one_script(tmp_path, environment):
    for split, count in (("train", 160), ("test", 4)):
        lines = [
            f'{{"question": "What is {i} + 1?", "answer": "{i}+1=<<{i}+1={i + 1}>>{i + 1} #### {i + 1}"}}\n'
            for i in range(count)
        ]
        (tmp_path / f"gsm8k_{split}.jsonl").write_text("".join(lines))
    small = {"RAW": str(tmp_path), "SFT_STEPS": "2", "STEPS": "1", "QUESTIONS": "4", "SAMPLES": "2"}
    batch = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    out = script("gsm8k_smollm", tmp_path / "out", *batch, environment=environment | small)
    assert out.count("avg@2") == out.count("pass@2") == 6  # three measurements, each at its time and at the end
    assert gsm8k.DATA_SOURCE in out
