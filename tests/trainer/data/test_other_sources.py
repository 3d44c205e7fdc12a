"""Rows of JSON lines and of the hub: the same rows as from parquet, and one error for what cannot be read."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.config.schema.data import DataConfig, HubData
from hybridrl.errors import DataError
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_dataset import RLHFDataset
from tests.support.trainer.letter_tokenizer import letter_tokenizer

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"word {i}"}],
        "data_source": "letters",
        "reward_model": {"ground_truth": "2026-11-23"},  # a text that looks like a date stays a text
        "extra_info": {"index": i},
    }
    for i in range(3)
]


def write_lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_json_lines_give_the_rows_of_a_parquet_file(tmp_path, name):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    files = [str(tmp_path / "rows.parquet"), write_lines(tmp_path / name, ROWS)]
    config = DataConfig(max_prompt_length=50)
    as_parquet, as_lines = (RLHFDataset(file, letter_tokenizer(), config) for file in files)
    for i in range(3):
        expected, found = as_parquet[i], as_lines[i]
        assert found.pop("input_ids").tolist() == expected.pop("input_ids").tolist() and found == expected
    assert as_lines[1]["reward_model"] == {"ground_truth": "2026-11-23"}


def test_a_column_that_some_lines_lack_is_null_there(tmp_path):
    rows = ParquetRows(write_lines(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y", "ability": "math"}]))
    assert [rows[i] for i in range(2)] == [{"prompt": "x", "ability": None}, {"prompt": "y", "ability": "math"}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prompt": "x"}\n{"prompt": \n', "rows.jsonl line 2 is not JSON"),
        ("[1, 2]\n", "rows.jsonl line 1 is not a JSON object with columns"),
        ('{"prompt": "x"}\n{"prompt": 3}\n', "rows.jsonl: column 'prompt' has values of several types"),
    ],
)
def test_lines_that_cannot_be_rows_are_one_error(tmp_path, text, reason):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match="rows.jsonl") as refused:
        ParquetRows(str(tmp_path / "rows.jsonl"))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("openai/gsm8k:test", ("openai/gsm8k", None, "test")),
        ("openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")),
    ],
)
def test_a_name_of_the_hub_has_a_split_and_perhaps_a_configuration(text, parts):
    source = HubData.named(text)
    assert (source.name, source.config, source.split) == parts


@pytest.mark.parametrize("text", ["a.parquet", "data/train.parquet", "/data/train", "./a/b", "a/b/c", "s3://a/b", "a"])
def test_a_path_is_no_name_of_the_hub(text):
    assert HubData.named(text) is None


def test_a_dataset_is_loaded_by_its_name_and_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `datasets` reads a directory of this name as it reads one of the hub
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "org" / "sums").mkdir(parents=True)
    for split, rows in {"train": ROWS[:1], "test": ROWS[1:]}.items():
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "org" / "sums" / f"{split}.parquet")
    rows = ParquetRows("org/sums:test")
    assert [rows[i]["extra_info"]["index"] for i in range(len(rows))] == [1, 2]
    assert rows.location(1) == "org/sums:test row 1"


def test_a_dataset_that_nobody_has_is_one_error_that_names_both_meanings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(DataError) as refused:
        ParquetRows("org/absent:test")
    text = str(refused.value)
    assert text.startswith("org/absent:test: no such file, and the Hugging Face hub gives no dataset org/absent")
    assert "does not answer" in text and "ORG/NAME:SPLIT" in text and "\n" not in text
