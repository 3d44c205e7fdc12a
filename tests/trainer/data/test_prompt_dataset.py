"""Prompts: the tokens of a row, rejected rows, and batches of rows."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.config.schema.data import DataConfig, ImportPath
from hybridrl.errors import ConfigError, DataError
from hybridrl.trainer.data.prompt_dataset import RLHFDataset, collate_fn, load_dataset
from tests.support.trainer.letter_tokenizer import ids, letter_tokenizer

CONFIG = DataConfig(max_prompt_length=20)


def write(path: Path, *rows: dict) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def prompts_of(dataset: RLHFDataset) -> list[list[int]]:
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


def test_a_prompt_is_its_messages_in_the_chat_template_with_the_generation_prompt(tmp_path):
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    dataset = RLHFDataset(write(tmp_path / "a.parquet", {"prompt": turns}), letter_tokenizer(), CONFIG)
    assert dataset[0]["input_ids"].tolist() == dataset[0]["raw_prompt_ids"] == ids("<sbe> <uhi> <a")
    assert dataset[0]["raw_prompt"] == turns


def test_a_string_is_a_user_message_or_plain_text_without_a_template(tmp_path):
    file = write(tmp_path / "a.parquet", {"question": "hi"})
    config = replace(CONFIG, prompt_key="question")
    assert prompts_of(RLHFDataset(file, letter_tokenizer(), config)) == [ids("<uhi> <a")]
    assert prompts_of(RLHFDataset(file, letter_tokenizer(None), config)) == [ids("hi")]
    assert RLHFDataset(file, letter_tokenizer(None), config)[0]["raw_prompt"] == user("hi")


def test_a_row_has_the_columns_for_its_reward_and_its_index(tmp_path):
    first = {
        "prompt": user("a"),
        "data_source": "s",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 70},
    }
    files = [
        write(tmp_path / "a.parquet", first),
        write(tmp_path / "b.parquet", {"prompt": "b"}),
    ]  # the two differ in columns and types
    dataset = RLHFDataset(files, letter_tokenizer(), CONFIG)
    known = {key: dataset[0][key] for key in ("data_source", "ability", "reward_model", "extra_info", "index", "uid")}
    assert known == {key: value for key, value in first.items() if key != "prompt"} | {"index": 70, "uid": "0"}
    assert (dataset[1]["index"], dataset[1]["uid"], dataset[1]["data_source"]) == (1, "1", "unknown")
    assert dataset[1]["reward_model"] == {"ground_truth": None}


def test_keyword_arguments_reach_the_template(tmp_path):
    template = "{{ word }}{{ messages[0]['content'] }}"
    config = replace(CONFIG, apply_chat_template_kwargs={"word": "oh "})
    dataset = RLHFDataset(write(tmp_path / "a.parquet", {"prompt": "hi"}), letter_tokenizer(template), config)
    assert prompts_of(dataset) == [ids("oh hi")]


def test_max_samples_uses_only_the_first_rows(tmp_path):
    files = [write(tmp_path / f"{i}.parquet", *({"prompt": f"{i}{j}"} for j in range(3))) for i in range(3)]
    dataset = RLHFDataset(files, letter_tokenizer(), CONFIG, max_samples=4)
    assert [dataset[i]["raw_prompt"][0]["content"] for i in range(len(dataset))] == ["00", "01", "02", "10"]
    assert len(RLHFDataset(files, letter_tokenizer(), CONFIG, max_samples=100)) == 9


# The prompt "abcdef" is <uabcdef> <a: 12 tokens; "ab" is <uab> <a: 8 tokens.


@pytest.mark.parametrize(("side", "kept"), [("left", "cdef> <a"), ("right", "<uabcdef"), ("middle", "<uab> <a")])
def test_a_longer_prompt_is_cut_to_the_limit(tmp_path, side, kept):
    config = DataConfig(max_prompt_length=8, truncation=side)
    dataset = RLHFDataset(write(tmp_path / "a.parquet", {"prompt": "abcdef"}), letter_tokenizer(), config)
    # middle keeps 4 tokens of either end: "<uab" and "> <a"
    assert prompts_of(dataset) == [ids(kept)]


def test_of_an_odd_limit_the_middle_cut_keeps_one_more_at_the_end(tmp_path):
    config = DataConfig(max_prompt_length=7, truncation="middle")
    assert prompts_of(RLHFDataset(write(tmp_path / "a.parquet", {"prompt": "abcdef"}), letter_tokenizer(), config)) == [
        ids("<ua> <a")
    ]


def test_a_longer_prompt_is_rejected_before_the_run_with_row_length_limit_and_the_keys_to_change(tmp_path):
    file = write(tmp_path / "a.parquet", *({"prompt": text} for text in ("ab", "abcdef", "abcdefgh")))
    with pytest.raises(DataError) as refused:
        RLHFDataset(file, letter_tokenizer(), DataConfig(max_prompt_length=8))
    message = str(refused.value)
    assert (
        f"{file} row 1: a prompt of 12 tokens is longer than data.max_prompt_length=8 (2 of 3 are, the longest has 14)"
        in message
    )
    assert "data.filter_overlong_prompts=true" in message and "data.truncation" in message


def test_the_filter_drops_longer_prompts_and_logs_how_many(tmp_path, caplog):
    file = write(tmp_path / "a.parquet", *({"prompt": text} for text in ("abcdef", "ab", "abcdefgh", "cd")))
    with caplog.at_level(logging.INFO):
        dataset = RLHFDataset(file, letter_tokenizer(), DataConfig(max_prompt_length=8, filter_overlong_prompts=True))
    assert prompts_of(dataset) == [ids("<uab> <a"), ids("<ucd> <a")]
    assert [dataset[i]["index"] for i in range(2)] == [1, 3]
    assert "2 of 4 prompts are longer than data.max_prompt_length=8" in caplog.text
    with pytest.raises(DataError, match="no prompts .*of 4 rows.*; raise data.max_prompt_length=2$"):
        RLHFDataset(file, letter_tokenizer(), DataConfig(max_prompt_length=2, filter_overlong_prompts=True))
    with pytest.raises(DataError, match="no prompts .*of 0 rows .*a.parquet; give files"):
        RLHFDataset(file, letter_tokenizer(), CONFIG, max_samples=0)


def test_rows_with_images_are_rejected_and_an_empty_image_column_is_not(tmp_path):
    empty = write(tmp_path / "a.parquet", {"prompt": "a", "images": []}, {"prompt": "b", "images": None})
    assert len(RLHFDataset(empty, letter_tokenizer(), CONFIG)) == 2
    filled = write(
        tmp_path / "b.parquet",
        *({"prompt": "a", "images": []} for _ in range(70)),
        {"prompt": "b", "images": ["x.png"]},
    )
    with pytest.raises(DataError, match=r"b.parquet row 70 .*'images' \(data.image_key\)"):
        RLHFDataset([empty, filled], letter_tokenizer(), CONFIG)


def test_missing_files_and_columns_are_named(tmp_path):
    with pytest.raises(DataError, match="no file .*gone.parquet"):
        RLHFDataset(str(tmp_path / "gone.parquet"), letter_tokenizer(), CONFIG)
    with pytest.raises(DataError, match="no data files were given"):
        RLHFDataset([], letter_tokenizer(), CONFIG)
    (tmp_path / "text.parquet").write_text("prompt\nhi\n")
    with pytest.raises(DataError, match="text.parquet is not a parquet file"):
        RLHFDataset(str(tmp_path / "text.parquet"), letter_tokenizer(), CONFIG)
    file = write(tmp_path / "a.parquet", {"question": "hi", "answer": "4"})
    with pytest.raises(DataError, match=r"a.parquet .*'prompt' \(data.prompt_key\); .*question, answer"):
        RLHFDataset(file, letter_tokenizer(), CONFIG)


@pytest.mark.parametrize(
    "prompt", [None, "", 7, [], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}]]
)
def test_a_value_that_is_no_prompt_is_rejected_with_its_row(tmp_path, prompt):
    file = write(tmp_path / "a.parquet", {"prompt": prompt})
    with pytest.raises(DataError, match="a.parquet row 0: expected"):
        RLHFDataset(file, letter_tokenizer(), CONFIG)


def test_a_row_that_the_template_rejects_is_named(tmp_path):
    template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no such role') }}{% endif %}{{ "
        "messages[0]['content'] }}"
    )
    file = write(tmp_path / "a.parquet", {"prompt": user("a")}, {"prompt": [{"role": "robot", "content": "b"}]})
    with pytest.raises(DataError, match="a.parquet row 1: .*template .*no such role"):
        RLHFDataset(file, letter_tokenizer(template), CONFIG)


def test_messages_without_a_chat_template_are_rejected(tmp_path):
    with pytest.raises(DataError, match="a.parquet row 0 .*tokenizer has no chat template"):
        RLHFDataset(write(tmp_path / "a.parquet", {"prompt": user("a")}), letter_tokenizer(None), CONFIG)


def test_a_batch_is_padded_on_the_left_to_its_longest_prompt(tmp_path):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", {"prompt": "abc"}, {"prompt": "a"}), letter_tokenizer(), CONFIG)
    batch = collate_fn([dataset[0], dataset[1]], pad_token_id=0).batch
    assert batch["input_ids"].tolist() == [ids("<uabc> <a"), ids("__<ua> <a")]
    assert batch["attention_mask"].tolist() == [[1] * 9, [0, 0] + [1] * 7]
    assert batch["position_ids"].tolist() == [list(range(9)), [0, 0, 0, 1, 2, 3, 4, 5, 6]]
    assert {str(column.dtype) for column in batch.values()} == {"torch.int64"}


def test_a_batchs_other_columns_are_objects_one_per_row_also_lists_of_equal_length(tmp_path):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", {"prompt": "ab"}, {"prompt": "cd"}), letter_tokenizer(), CONFIG)
    columns = collate_fn([dataset[0], dataset[1]], pad_token_id=0).non_tensor_batch
    names = ["raw_prompt_ids", "raw_prompt", "data_source", "reward_model", "ability", "extra_info", "index", "uid"]
    assert sorted(columns) == sorted(names)
    assert all(column.shape == (2,) and column.dtype == np.dtype(object) for column in columns.values())
    assert columns["raw_prompt_ids"].tolist() == [ids("<uab> <a"), ids("<ucd> <a")]


def test_a_custom_class_replaces_the_dataset(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(
        "from hybridrl.trainer.data.prompt_dataset import RLHFDataset\n"
        "class Shouting(RLHFDataset):\n"
        "    def __getitem__(self, position):\n"
        "        return super().__getitem__(position) | {'loud': True}\n"
        "class WithProcessor(RLHFDataset):\n"  # in verl's form
        "    def __init__(self, data_files, tokenizer, config, processor, max_samples=-1):\n"
        "        super().__init__(data_files, tokenizer, config, processor, max_samples)\n"
        "class ByKeyword(RLHFDataset):\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, **kwargs):\n"
        "        super().__init__(data_files, tokenizer, config=config, processor=processor, **kwargs)\n"
        "class Limitless(RLHFDataset):\n"
        "    def __init__(self, data_files, tokenizer, config):\n"
        "        super().__init__(data_files, tokenizer, config)\n"
        "def not_a_dataset(): ...\n"
    )
    file = write(tmp_path / "a.parquet", {"prompt": "a"}, {"prompt": "b"})

    def load(path: str | None, name: str | None):
        return load_dataset(
            replace(CONFIG, custom_cls=ImportPath(path, name)), [file], letter_tokenizer(), max_samples=1
        )

    assert collate_fn([load(str(code), "Shouting")[0]], pad_token_id=0).non_tensor_batch["loud"].tolist() == [True]
    for name in ("WithProcessor", "ByKeyword"):
        assert load(str(code), name)[0]["raw_prompt"] == load(None, None)[0]["raw_prompt"]
    with pytest.raises(ConfigError, match=r"Limitless in .* does not take what it gets \(.*'max_samples'\); define"):
        load(str(code), "Limitless")
    assert type(load(None, None)) is RLHFDataset and len(load(None, None)) == 1
    with pytest.raises(ConfigError, match="go together"):
        load(str(code), None)
    with pytest.raises(ConfigError, match="did you mean Shouting"):
        load(str(code), "Shoutin")
    with pytest.raises(ConfigError, match="not_a_dataset in .*__len__ and __getitem__"):
        load(str(code), "not_a_dataset")


@pytest.mark.parametrize("template", [True, False])
def test_messages_as_json_text_are_refused_and_other_text_in_brackets_is_not(tmp_path, template):
    tokenizer = letter_tokenizer() if template else letter_tokenizer(None)
    text = '[{"role": "user", "content": "hi"}]'
    with pytest.raises(DataError, match=r"a.parquet row 1: the text is a list of messages as JSON.* json.loads"):
        RLHFDataset(write(tmp_path / "a.parquet", {"prompt": "hi"}, {"prompt": text}), tokenizer, CONFIG)
    assert len(RLHFDataset(write(tmp_path / "b.parquet", {"prompt": "[1, 2]"}), tokenizer, CONFIG)) == 1


def truth(value, **more) -> dict:
    return {"prompt": "hi", "reward_model": {"style": "rule", "ground_truth": value} | more}


def test_a_row_without_the_ground_truth_that_others_have_is_refused_with_its_number(tmp_path):
    with pytest.raises(DataError, match=r"row 1: reward_model.ground_truth is null \(1 of 2 rows\).*remove the row"):
        RLHFDataset(write(tmp_path / "a.parquet", truth("4"), truth(None)), letter_tokenizer(), CONFIG)
    for name, rows in {"b": [truth(None)] * 2, "c": [truth("4"), truth(None, style="model")]}.items():
        assert len(RLHFDataset(write(tmp_path / name, *rows), letter_tokenizer(), CONFIG)) == 2


def test_a_column_of_the_users_is_the_ground_truth(tmp_path):
    file = write(tmp_path / "a.parquet", {"question": "hi", "answer": "4", "reward_model": {"style": "rule"}})
    config = replace(CONFIG, prompt_key="question", ground_truth_key="answer")
    dataset = RLHFDataset(file, letter_tokenizer(), config)
    assert dataset[0]["reward_model"] == {"style": "rule", "ground_truth": "4"} and dataset.has_ground_truths
    with pytest.raises(DataError, match=r"no column 'truth' \(data.ground_truth_key\)"):
        RLHFDataset(file, letter_tokenizer(), replace(config, ground_truth_key="truth"))
    with pytest.raises(DataError, match=r"row 1: answer \(data.ground_truth_key\) is null"):
        rows = [{"question": "hi", "answer": answer} for answer in ("4", None)]
        RLHFDataset(write(tmp_path / "b.parquet", *rows), letter_tokenizer(), config)
