"""Parquet files: a damaged or unsuitable one is one error that names the file, whatever is wrong with it."""

import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.cli.__main__ import main
from hybridrl.config.schema.data import DataConfig
from hybridrl.errors import DataError
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_dataset import RLHFDataset
from tests.support.trainer.letter_tokenizer import letter_tokenizer

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"word {i}"}],
        "data_source": "letters",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i},
    }
    for i in range(40)
]


@pytest.fixture
def file(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet", write_page_checksum=True)
    return tmp_path / "data.parquet"


def rewrite(file, change):
    pq.write_table(change(pq.read_table(file)), file)


def refusal(file) -> str:
    with pytest.raises(DataError) as refused:
        RLHFDataset(str(file), letter_tokenizer(), DataConfig(max_prompt_length=50))
    text = str(refused.value)
    assert text.startswith(str(file)) and "\n" not in text
    return text


@pytest.mark.timeout(120)
def test_every_damage_is_one_error_with_the_files_name(file):
    whole, random_bytes, found = file.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(random_bytes.choice([1, 1, 8, 64])):
            damaged[random_bytes.randrange(len(damaged))] ^= 1 << random_bytes.randrange(8)
        file.write_bytes(damaged[: random_bytes.choice([len(damaged)] * 4 + [random_bytes.randrange(len(damaged))])])
        try:
            read = ParquetRows(str(file))
            assert len([read[i] for i in range(len(read))]) == len(read)  # the footer has no checksum
        except DataError as error:
            found += 1
            assert str(file) in str(error) and "\n" not in str(error)
    assert found > 60


def test_a_flipped_byte_in_a_page_is_noticed(file):
    pq.write_table(pa.Table.from_pylist(ROWS), file, write_page_checksum=True, compression="none", use_dictionary=False)
    whole = file.read_bytes()
    at = whole.index(b"word 17")
    file.write_bytes(whole[:at] + b"W" + whole[at + 1 :])
    assert "damaged" in refusal(file)


def test_two_columns_of_one_name_are_named(file):
    rewrite(file, lambda table: table.append_column("prompt", table["prompt"]))
    assert refusal(file) == f"{file} has several columns named 'prompt'; rename or drop all but one"


def test_text_that_is_not_utf8_is_refused_before_training(file):
    def change(table):
        raw = pa.array([b"\xff\xfe"] * table.num_rows, type=pa.binary())
        column = pa.Array.from_buffers(pa.string(), table.num_rows, raw.buffers())
        return table.set_column(table.column_names.index("data_source"), "data_source", column)

    rewrite(file, change)
    assert "Invalid UTF8" in refusal(file)


@pytest.mark.parametrize("column", ["reward_model", "extra_info"])
def test_a_text_where_a_mapping_belongs_is_named_with_its_type(file, column):
    rewrite(file, lambda t: t.set_column(t.column_names.index(column), column, pa.array(["4"] * t.num_rows)))
    assert f"column '{column}' must have a mapping" in (text := refusal(file)) and "type string" in text


def test_a_data_source_that_is_no_text_is_named_with_its_type(file):
    rewrite(file, lambda t: t.set_column(t.column_names.index("data_source"), "data_source", pa.array([1] * 40)))
    assert "'data_source' must have a text" in (text := refusal(file)) and "type int64" in text


def test_data_sources_have_the_file_and_row_of_their_first_prompt(tmp_path):
    files = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    for path, sources in zip(files, (["x", None, "y"], ["y", "z"]), strict=True):
        rows = [{"prompt": "a", "data_source": source} for source in sources]
        pq.write_table(pa.Table.from_pylist(rows), path)
    dataset = RLHFDataset(files, letter_tokenizer(), DataConfig(max_prompt_length=50))
    assert dataset.data_sources() == {"x": f"{files[0]} row 0", "y": f"{files[0]} row 2", "z": f"{files[1]} row 1"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "prompt,answer\nhi,4\n", "pandas.read_csv("),
        ("a.tsv", "prompt\tanswer\nhi\t4\n", "sep='\\t'"),
        ("a.json", '\n [{"prompt": "hi"}]', "pandas.read_json("),
        ("a.json", '{"prompt": "hi"}\n{"prompt": "ha"}\n', "rename it to end with .jsonl"),
    ],
)
def test_csv_and_json_are_refused_with_the_line_that_converts_them(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    assert says in refusal(tmp_path / name)


def test_the_line_that_converts_a_csv_file_does_so(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text("prompt,answer\nhi,4\n")
    program = refusal(tmp_path / "a.csv").partition('python -c "')[2].rstrip('"')
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)
    assert ParquetRows(str(tmp_path / "a.jsonl"))[0] == {"prompt": "hi", "answer": 4}


def test_categories_of_pandas_are_read_as_their_values(file, capsys):
    rewrite(file, lambda table: table.set_column(1, "data_source", table["data_source"].dictionary_encode()))
    assert pa.types.is_dictionary(pq.read_schema(file).field("data_source").type)
    assert RLHFDataset(str(file), letter_tokenizer(), DataConfig(max_prompt_length=50))[3]["data_source"] == "letters"
    assert main(["data", "inspect", str(file)]) == 0 and "letters" in capsys.readouterr().out


def test_a_text_that_no_tokenizer_takes_is_named_before_it_is_tokenized(file, tiny_qwen2, capsys):
    long = "a " * 5_000_001
    rewrite(
        file, lambda table: pa.Table.from_pylist([*ROWS[:3], ROWS[0] | {"prompt": [{"role": "user", "content": long}]}])
    )
    assert "row 3: a text has 10000002 characters" in refusal(file)
    assert main(["data", "inspect", str(file), "--model", str(tiny_qwen2)]) == 1
    assert "row 3: a text has 10000002 characters" in capsys.readouterr().out
