"""Raw rows to parquet: the row format of each dataset, and the errors for bad input. Samples are in tests/data/raw."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_preprocess import full_hh_rlhf, geometry3k, gsm8k, hellaswag, math_dataset

SAMPLES = Path(__file__).parent.parent / "data" / "raw"


BAD_LABEL = {"label": 4, "activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"]}


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def write_lines(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def error_of(capsys: pytest.CaptureFixture, exit_code: int) -> str:
    assert exit_code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


def test_gsm8k_rows_hold_the_question_with_the_instruction_and_the_number_without_commas(tmp_path):
    assert gsm8k.main(["--local_dir", str(tmp_path), "--data_source", str(SAMPLES)]) == 0
    train, test = rows(tmp_path / "train.parquet"), rows(tmp_path / "test.parquet")
    question = "Mara has 3 bags with 4 marbles each. How many marbles does she have?"
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert train[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "12"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": "She has 3*4 = <<3*4=12>>12 marbles.\n#### 12",
            "question": question,
        },
    }
    assert [row["reward_model"]["ground_truth"] for row in train + test] == ["12", "3250", "-5"]
    assert [(row["extra_info"]["split"], row["extra_info"]["index"]) for row in train + test] == [
        ("train", 0),
        ("train", 1),
        ("test", 0),
    ]


def test_math_rows_hold_the_content_of_the_last_box(tmp_path):
    assert math_dataset.main(["--local_dir", str(tmp_path), "--data_source", str(SAMPLES)]) == 0
    found = rows(tmp_path / "test.parquet")
    assert [row["reward_model"]["ground_truth"] for row in found] == [r"\frac{3}{4}", "4"]
    assert found[1]["prompt"][0]["content"].endswith(r"within \boxed{}.")
    assert {row["data_source"] for row in found} == {"DigitalLearningGmbH/MATH-lighteval"}
    assert not (tmp_path / "train.parquet").exists(), "the source has no training split"


def test_hellaswag_rows_hold_four_endings_and_the_number_of_the_right_one(tmp_path):
    assert hellaswag.main(["--local_dir", str(tmp_path), "--data_source", str(SAMPLES)]) == 0
    train, validation = rows(tmp_path / "train.parquet"), rows(tmp_path / "validation.parquet")
    assert train[0]["prompt"] == [{"role": "user", "content": "Making tea: How to make tea. Boil the water. You"}]
    assert train[0]["reward_model"] == {
        "style": "model",
        "eval": "multiple_choice",
        "ground_truth": 2,
        "choices": ["swim home.", "eat the kettle.", "pour it over the leaves .", "sing."],
    }
    assert validation[0]["extra_info"]["answer"] == "He rows."
    assert not (tmp_path / "test.parquet").exists(), "rows without an answer are left out"


def test_hh_rlhf_makes_rows_for_fine_tuning_for_a_reward_model_and_for_rl(tmp_path, capsys):
    for split in ("sft", "rm", "kto", "rl"):
        assert full_hh_rlhf.main(["--split", split, "--local_dir", str(tmp_path), "--data_source", str(SAMPLES)]) == 0
    assert "4 of 5 pairs have a common prompt" in capsys.readouterr().out
    sft, rl = rows(tmp_path / "sft" / "train.parquet"), rows(tmp_path / "rl" / "train.parquet")
    dialogue = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: Which way is north?\n\nAssistant:"
    assert [(row["prompt"], row["response"]) for row in sft[:2]] == [
        (dialogue, " Look for the pole star."),
        (dialogue, " No idea."),
    ]
    assert sft[0]["messages"] == [*rl[0]["prompt"], {"role": "assistant", "content": "Look for the pole star."}]
    assert len(sft) == 8 and len(rl) == 4
    assert rl[0]["prompt"] == [{"role": "user", "content": dialogue}]
    assert rl[0]["reward_model"] == {"style": "model", "ground_truth": " Look for the pole star."}
    rm = rows(tmp_path / "rm" / "train.parquet"), rows(tmp_path / "rm" / "test.parquet")
    assert [len(part) for part in rm] == [3, 1]  # three quarters of four pairs, and the rest
    assert rm[1][0] == {"prompt": "\n\nHuman: Name a bird\n\nAssistant:", "chosen": " Wren.", "rejected": " Granite."}
    kto = rows(tmp_path / "kto" / "train.parquet"), rows(tmp_path / "kto" / "test.parquet")
    assert [len(part) for part in kto] == [6, 2]
    assert [(row["completion"], row["label"]) for row in kto[1]] == [(" Wren.", True), (" Granite.", False)]
    assert {row["prompt"] for row in kto[1]} == {"\n\nHuman: Name a bird\n\nAssistant:"}


def test_hh_rlhf_reads_pairs_that_have_a_prompt_column(tmp_path):
    source = write_lines(tmp_path / "pairs.jsonl", {"prompt": "Q", "response": "A", "chosen": "A", "rejected": "B"})
    assert full_hh_rlhf.main(["--split", "sft", "--local_dir", str(tmp_path), "--data_source", str(source)]) == 0
    found = [
        (row["prompt"], row["response"], row["messages"][-1]["content"])
        for row in rows(tmp_path / "sft" / "train.parquet")
    ]
    assert found == [("Q", "A", "A"), ("Q", "B", "B")]


def test_a_compressed_file_and_its_split_are_read(tmp_path):
    source = tmp_path / "my-test.jsonl.gz"
    with gzip.open(source, "wt", encoding="utf-8") as out:
        out.write((SAMPLES / "gsm8k_test.jsonl").read_text())
    assert gsm8k.main(["--local_dir", str(tmp_path), "--data_source", str(source)]) == 0
    assert len(rows(tmp_path / "test.parquet")) == 1
    assert not (tmp_path / "train.parquet").exists()


@pytest.mark.parametrize(
    ("script", "record", "message"),
    [
        (gsm8k, {"question": "?"}, "line 1 has no column 'answer'; it has question"),
        (gsm8k, {"question": "?", "answer": "12"}, "line 1: column 'answer' has no '#### number'"),
        (math_dataset, {"problem": "?", "solution": "4"}, "line 1: column 'solution' has no \\boxed answer"),
        (math_dataset, {"problem": "?", "solution": r"\boxed{4"}, "never closed"),
        (math_dataset, {"problem": "?", "solution": r"$\boxed $"}, "empty \\boxed"),
        (hellaswag, BAD_LABEL, "'4', not the number of one of 2 endings"),
        (hellaswag, {"label": ""}, "has no rows with an answer"),
    ],
)
def test_a_bad_row_is_one_line_that_names_file_and_column(tmp_path, capsys, script, record, message):
    source = write_lines(tmp_path / "raw.jsonl", record)
    error = error_of(capsys, script.main(["--local_dir", str(tmp_path / "out"), "--data_source", str(source)]))
    assert str(source) in error and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.jsonl", b'{"question": "a", "answer": "#### 1"}\n{oops\n', "line 2 is not JSON"),
        ("list.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("empty.jsonl", b"\n", "has no rows"),
        ("latin.jsonl", b'{"question": "\xff"}\n', "cannot be read"),
        ("plain.jsonl.gz", b'{"question": "a"}\n', "cannot be read"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    error = error_of(capsys, gsm8k.main(["--local_dir", str(tmp_path), "--data_source", str(tmp_path / name)]))
    assert name in error and message in error


def test_a_missing_file_a_directory_without_the_dataset_and_a_target_that_is_a_file_are_named(tmp_path, capsys):
    missing = str(tmp_path / "nothing.jsonl")
    assert f"no file or directory {missing}" in error_of(
        capsys, gsm8k.main(["--local_dir", str(tmp_path), "--data_source", missing])
    )
    write_lines(tmp_path / "other.jsonl", {"question": "?"})
    assert "it has other.jsonl" in error_of(
        capsys, gsm8k.main(["--local_dir", str(tmp_path), "--data_source", str(tmp_path)])
    )
    target = tmp_path / "other.jsonl"
    assert "other.jsonl" in error_of(capsys, gsm8k.main(["--local_dir", str(target), "--data_source", str(SAMPLES)]))


def test_a_hub_that_does_not_answer_is_one_line_at_once(tmp_path):
    command = [
        sys.executable,
        "-m",
        "data_preprocess.gsm8k",
        "--data_source",
        "nobody/nothing",
        "--local_dir",
        str(tmp_path),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, timeout=60, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert (
        done.stderr.startswith("error: nobody/nothing is not a local path")
        and "http://127.0.0.1:9 does not answer" in done.stderr
    )


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    assert gsm8k.main(["--local_dir", str(tmp_path), "--data_source", str(SAMPLES)]) == 0
    before = (tmp_path / "train.parquet").read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    assert gsm8k.main(["--local_dir", str(tmp_path), "--data_source", str(SAMPLES)]) == 2
    assert (tmp_path / "train.parquet").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]


def test_the_real_datasets_are_converted_whole(tmp_path, shared_data):
    counts = {}
    for name, script in (("gsm8k", gsm8k), ("math", math_dataset), ("hellaswag", hellaswag)):
        assert script.main(["--local_dir", str(tmp_path / name), "--data_source", str(shared_data)]) == 0
        counts |= {
            f"{name}/{path.stem}": pq.read_metadata(path).num_rows for path in sorted((tmp_path / name).iterdir())
        }
    assert full_hh_rlhf.main(["--split", "rl", "--local_dir", str(tmp_path), "--data_source", str(shared_data)]) == 0
    counts["hh"] = pq.read_metadata(tmp_path / "rl" / "train.parquet").num_rows
    assert counts == {"gsm8k/train": 7473, "gsm8k/test": 1319, "math/test": 5000, "hellaswag/train": 5, "hh": 2307}
    answers = [row["reward_model"]["ground_truth"] for row in rows(tmp_path / "gsm8k" / "train.parquet")]
    assert all(answer.lstrip("-").replace(".", "").isdecimal() for answer in answers)


def test_geometry3k_rows_hold_the_problem_with_its_tag_and_the_bytes_of_its_figure(tmp_path, capsys):
    (tmp_path / "figure.png").write_bytes(b"figure")
    raw = {"problem": "<image>Find x.", "answer": "3", "images": ["figure.png"]}
    source = write_lines(tmp_path / "geo3k_train.jsonl", raw)
    assert geometry3k.main(["--local_dir", str(tmp_path), "--data_source", str(source)]) == 0
    [row] = rows(tmp_path / "train.parquet")
    assert row["prompt"][0]["content"].startswith("<image>Find x. You FIRST think")
    assert row["images"] == [{"bytes": b"figure", "path": None}]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("hiyouga/geometry3k", "3")
    capsys.readouterr()
    write_lines(source, raw | {"images": ["gone.png"]})
    code = geometry3k.main(["--local_dir", str(tmp_path), "--data_source", str(source)])
    assert "line 1: the image 'gone.png' cannot be read" in error_of(capsys, code)
