"""Datasets of preferences: tokens, masks and columns of a batch, and the rows that are refused."""

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.config.schema.preference import DPODataConfig, RMDataConfig
from hybridrl.errors import DataError
from hybridrl.trainer.supervised.preference import mismatched_rows
from hybridrl.trainer.supervised.preference_data import LabelDataset, PairDataset
from tests.support.trainer.letter_tokenizer import PLAIN, ids, letter_tokenizer

CONFIG = DPODataConfig(max_length=64)


def write(path: Path, *rows: dict) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def pair(prompt="hi", chosen="yes", rejected="no", **more) -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | more


def shown(dataset, row: int = 0) -> list[tuple[list[int], int]]:
    """Return the tokens of each sequence of a row, and the length of its response, which is at the end."""
    found = []
    for sequence in dataset[row]["sequences"]:
        mask = sequence["loss_mask"].tolist()
        assert mask == sorted(mask)
        found.append((sequence["input_ids"].tolist(), sum(mask)))
    return found


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("hi", "yes", "no"),
        ([user("hi")], [assistant("yes")], [assistant("no")]),
        ([user("hi")], [user("hi"), assistant("yes")], [user("hi"), assistant("no")]),
        ("hi", [user("hi"), assistant("yes")], [user("hi"), assistant("no")]),
    ],
    ids=["text", "messages", "whole conversations", "text and whole conversations"],
)
def test_all_forms_of_a_pair_give_the_same_tokens(tmp_path, prompt, chosen, rejected):
    file = write(tmp_path / "a.parquet", pair(prompt, chosen, rejected))
    dataset = PairDataset(file, letter_tokenizer(PLAIN), CONFIG)
    # the response ends with the end of the turn, >; the template's blank after it is left out
    assert shown(dataset) == [(ids("<uhi> <ayes>"), 4), (ids("<uhi> <ano>"), 3)]


def test_text_without_a_template_is_tokenized_as_it_is_and_ended(tmp_path):
    tokenizer = letter_tokenizer(None)
    dataset = PairDataset(write(tmp_path / "a.parquet", pair()), tokenizer, CONFIG)
    end = [tokenizer.eos_token_id]
    assert shown(dataset) == [(ids("hi") + ids("yes") + end, 4), (ids("hi") + ids("no") + end, 3)]


def test_a_prompt_of_several_turns_is_not_trained(tmp_path):
    turns = [user("a"), assistant("b"), user("c")]
    file = write(tmp_path / "a.parquet", pair(turns, [assistant("yes")], [assistant("no")]))
    assert shown(PairDataset(file, letter_tokenizer(PLAIN), CONFIG))[0] == (ids("<ua> <ab> <uc> <ayes>"), 4)


def test_a_batch_has_both_halves_of_every_pair_next_to_each_other(tmp_path):
    file = write(tmp_path / "a.parquet", pair(), pair("a", "b", "c"))
    dataset = PairDataset(file, letter_tokenizer(PLAIN), CONFIG)
    batch = dataset.collate([dataset[0], dataset[1]]).batch
    assert batch["pair"].tolist() == [0, 0, 1, 1] and batch["preferred"].tolist() == [1, 0, 1, 0]
    lengths = [12, 11, 9, 9]  # <uhi> <ayes>, <uhi> <ano>, <ua> <ab>, <ua> <ac>
    assert batch["attention_mask"].sum(-1).tolist() == lengths and batch["input_ids"].shape == (4, 12)
    assert batch["response_mask"].sum(-1).tolist() == [4, 3, 2, 2] and batch["responses"].shape == (4, 11)
    assert batch["input_ids"][1, :11].tolist() == ids("<uhi> <ano>")


def test_margins_are_those_of_both_halves(tmp_path):
    file = write(tmp_path / "a.parquet", pair(gap=1.5), pair(gap=-2.0))
    dataset = PairDataset(file, letter_tokenizer(PLAIN), RMDataConfig(max_length=64, margin_key="gap"))
    assert dataset.collate([dataset[1], dataset[0]]).batch["margin"].tolist() == [-2.0, -2.0, 1.5, 1.5]


def test_labels_are_true_false_1_and_0(tmp_path):
    for values in ([True, False], [1, 0], [1.0, 0.0]):
        rows = [{"prompt": "hi", "completion": "yes", "label": value} for value in values]
        dataset = LabelDataset(write(tmp_path / "a.parquet", *rows), letter_tokenizer(PLAIN), CONFIG)
        batch = dataset.collate([dataset[0], dataset[1]]).batch
        assert batch["preferred"].tolist() == [1, 0] and "pair" not in batch.keys()
    assert shown(dataset) == [(ids("<uhi> <ayes>"), 4)]


def test_labels_that_are_all_equal_are_reported(tmp_path, caplog):
    rows = [{"prompt": "hi", "completion": text, "label": True} for text in ("yes", "no")]
    LabelDataset(write(tmp_path / "a.parquet", *rows), letter_tokenizer(PLAIN), CONFIG)
    assert "all 2 rows have the same value" in caplog.text


def test_mismatched_rows_have_the_response_of_the_next_row_cut_to_the_limit(tmp_path):
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in (("a", "xyz"), ("bcd", "v"))]
    dataset = LabelDataset(write(tmp_path / "a.parquet", *rows), letter_tokenizer(PLAIN), CONFIG)
    batch = mismatched_rows(dataset.collate([dataset[0], dataset[1]]), max_length=11)
    # <ubcd> <axyz> would have 13 tokens
    wanted = [ids("<ua> <av>"), ids("<ubcd> <axy>")[:11]]
    for row, tokens in enumerate(wanted):
        assert batch.batch["input_ids"][row, : len(tokens)].tolist() == tokens
    assert batch.batch["attention_mask"].sum(-1).tolist() == [9, 11]
    assert batch.batch["response_mask"].sum(-1).tolist() == [2, 2]


def test_mismatched_rows_have_the_response_to_another_prompt(tmp_path):
    texts = (("a", "v"), ("a", "w"), ("b", "x"), ("b", "y"))
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in texts]
    dataset = LabelDataset(write(tmp_path / "a.parquet", *rows), letter_tokenizer(PLAIN), CONFIG)
    batch = mismatched_rows(dataset.collate([dataset[row] for row in range(4)]), max_length=11)
    wanted = [ids(text) for text in ("<ua> <ax>", "<ua> <ax>", "<ub> <av>", "<ub> <av>")]
    assert batch.batch["input_ids"].tolist() == wanted


@pytest.mark.parametrize("missing", ["prompt", "chosen", "rejected"])
def test_a_missing_column_is_named_with_its_setting(tmp_path, missing):
    row = {key: value for key, value in pair().items() if key != missing}
    with pytest.raises(DataError, match=rf"a.parquet has no column '{missing}' \(data.{missing}_key\); it has "):
        PairDataset(write(tmp_path / "a.parquet", row), letter_tokenizer(PLAIN), CONFIG)


def test_labels_of_pairs_are_their_chosen_responses_and_then_their_rejected_ones(tmp_path):
    file = write(tmp_path / "a.parquet", pair("a", "b", "c"), pair("d", "x" * 99, "y"), pair("e", "f", "g"))
    dataset = LabelDataset(file, letter_tokenizer(PLAIN), DPODataConfig(max_length=64, truncation="filter"))
    texts = ["<ua> <ab>", "<ue> <af>", "<ua> <ac>", "<ue> <ag>"]
    assert [shown(dataset, row) for row in range(len(dataset))] == [[(ids(text), 2)] for text in texts]
    batch = dataset.collate([dataset[row] for row in range(4)]).batch
    assert batch["preferred"].tolist() == [1, 1, 0, 0] and "pair" not in batch.keys()


def test_a_pair_of_equal_responses_has_no_labels(tmp_path):
    file = write(tmp_path / "a.parquet", pair(), pair("a", "b", "b"))
    with pytest.raises(DataError, match="a.parquet row 1: .*'chosen' and 'rejected' are equal"):
        LabelDataset(file, letter_tokenizer(PLAIN), CONFIG)


@pytest.mark.parametrize("missing", ["label", "completion", "prompt"])
def test_a_missing_column_of_labelled_responses_is_named(tmp_path, missing):
    row = {"prompt": "hi", "completion": "yes", "label": True, "chosen": "yes"}
    file = write(tmp_path / "a.parquet", {key: value for key, value in row.items() if key != missing})
    with pytest.raises(DataError, match=rf"no column '{missing}' \(data.{missing}_key\); it has "):
        LabelDataset(file, letter_tokenizer(PLAIN), CONFIG)


@pytest.mark.parametrize("label", [None, "good", 0.5])
def test_a_value_that_is_no_label_is_refused_with_its_row(tmp_path, label):
    row = {"prompt": "hi", "completion": "yes", "label": label}
    with pytest.raises(DataError, match=f"a.parquet row 0: label={label!r} is not a label"):
        LabelDataset(write(tmp_path / "a.parquet", row), letter_tokenizer(PLAIN), CONFIG)


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_a_value_that_is_no_margin_is_refused_with_its_row(tmp_path, gap):
    config = RMDataConfig(max_length=64, margin_key="gap")
    with pytest.raises(DataError, match="a.parquet row 1: gap=.*finite number"):
        PairDataset(write(tmp_path / "a.parquet", pair(gap=1.0), pair(gap=gap)), letter_tokenizer(PLAIN), config)


def test_equal_responses_are_refused_with_their_number(tmp_path):
    file = write(tmp_path / "a.parquet", pair(), pair("a", "b", "b"), pair("a", "c", "c"))
    with pytest.raises(DataError, match=r"a.parquet row 1: .*equal \(2 of 3"):
        PairDataset(file, letter_tokenizer(PLAIN), CONFIG)


def test_a_pair_of_which_one_half_is_too_long_is_refused_or_left_out_whole(tmp_path, caplog):
    file = write(tmp_path / "a.parquet", pair("a", "b", "c"), pair())
    with pytest.raises(DataError, match=r"row 1: .*12 tokens .*data.max_length=11 \(1 of 2"):
        PairDataset(file, letter_tokenizer(PLAIN), DPODataConfig(max_length=11))
    with caplog.at_level(logging.INFO):
        dataset = PairDataset(file, letter_tokenizer(PLAIN), DPODataConfig(max_length=11, truncation="filter"))
    assert len(dataset) == 1 and "left out 1 of 2 rows" in caplog.text
    assert shown(dataset) == [(ids("<ua> <ab>"), 2), (ids("<ua> <ac>"), 2)]
    with pytest.raises(DataError, match="no rows are left of 2"):
        PairDataset(file, letter_tokenizer(PLAIN), DPODataConfig(max_length=3, truncation="filter"))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (pair(""), "a.parquet row 0: expected a non-empty list of messages"),
        (pair(None), "a.parquet row 0: expected a non-empty list of messages"),
        (pair("hi", None, "no"), "a.parquet row 0: expected a non-empty list of messages"),
        (
            pair([user("hi")], [user("hi")], [assistant("no")]),
            "row 0: a response must end with a message of the assist",
        ),
        (pair([user("hi")], [user("what")], [assistant("no")]), "row 0: a response must end with a message of the ass"),
    ],
)
def test_a_row_that_is_no_preference_is_refused_with_its_row(tmp_path, row, problem):
    with pytest.raises(DataError, match=problem):
        PairDataset(write(tmp_path / "a.parquet", row), letter_tokenizer(PLAIN), CONFIG)


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path):
    template = PLAIN.replace("{{ '<a' }}", "{{ '<a think' }}")
    with pytest.raises(DataError, match="a.parquet row 0: .*prompt are not a prefix"):
        PairDataset(write(tmp_path / "a.parquet", pair()), letter_tokenizer(template), CONFIG)


@pytest.mark.parametrize("blank", [" ", [assistant("  ")], [user("hi"), assistant("\n")]], ids=str)
def test_a_blank_response_is_refused_with_its_row_or_left_out(tmp_path, blank, caplog):
    chosen, rejected = ([assistant("yes")], [assistant("no")]) if isinstance(blank, list) else ("yes", "no")
    rows = [pair("hi", chosen, rejected), pair("hi", chosen, blank)]
    file = write(tmp_path / "a.parquet", *rows)
    with pytest.raises(DataError, match=r"row 1: column 'rejected' is blank \(1 of 2 rows .*data.truncation=filter"):
        PairDataset(file, letter_tokenizer(), CONFIG)
    with caplog.at_level(logging.INFO):
        dataset = PairDataset(file, letter_tokenizer(), DPODataConfig(max_length=64, truncation="filter"))
    assert len(dataset) == 1 and "left out 1 of 2 rows, which have a blank response" in caplog.text
    assert shown(dataset) == shown(PairDataset(write(tmp_path / "b.parquet", rows[0]), letter_tokenizer(), CONFIG))


def test_only_the_first_rows_are_used(tmp_path):
    file = write(tmp_path / "a.parquet", pair(), pair("a", "b", "c"), pair("a", "b", "b"))
    assert len(PairDataset(file, letter_tokenizer(PLAIN), CONFIG, max_samples=2)) == 2
    assert len(LabelDataset(file, letter_tokenizer(PLAIN), CONFIG, max_samples=2)) == 4
