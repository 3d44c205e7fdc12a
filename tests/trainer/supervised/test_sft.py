"""The fine-tuning dataset: the assistant's tokens, refused rows, and how rows become a batch."""

import logging
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.config.schema.sft import SFTDataConfig
from hybridrl.errors import DataError
from hybridrl.trainer.data.prompt_loader import PromptLoader
from hybridrl.trainer.data.sequences import collate_sequences
from hybridrl.trainer.supervised.sft import SFTDataset
from tests.support.trainer.letter_tokenizer import MARKED, PLAIN, ids, letter_tokenizer

CONFIG = SFTDataConfig(max_length=64)


def write(path: Path, *conversations: list | None, key: str = "messages") -> str:
    pq.write_table(pa.Table.from_pylist([{key: conversation} for conversation in conversations]), path)
    return str(path)


def talk(*texts: str) -> list[dict]:
    """Turns of user and assistant, one after the other."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def both(dataset: SFTDataset, row: int = 0) -> tuple[list[int], list[int]]:
    return dataset[row]["input_ids"].tolist(), dataset[row]["loss_mask"].tolist()


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["by markers", "by turns"])
def test_the_loss_is_on_the_assistants_tokens_with_its_end_of_turn_in_every_turn(tmp_path, template):
    file = write(tmp_path / "a.parquet", talk("hi", "yo", "why", "so"), talk("a", "b"))
    dataset = SFTDataset(file, letter_tokenizer(template), CONFIG)
    tokens = "<uhi> <ayo> <uwhy> <aso> "
    wanted = "0000000011100000000001110"
    assert both(dataset) == (ids(tokens), [int(digit) for digit in wanted])
    assert both(dataset, 1) == (ids("<ua> <ab> "), [0, 0, 0, 0, 0, 0, 0, 1, 1, 0])


def test_generation_markers_decide_and_not_the_turns(tmp_path):
    template = MARKED.replace(
        "{{ m['content'] + '>' }}{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}{{ '>' }}"
    )
    dataset = SFTDataset(write(tmp_path / "a.parquet", talk("a", "bc")), letter_tokenizer(template), CONFIG)
    assert both(dataset) == (ids("<ua> <abc> "), [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0])


def test_without_an_end_of_sequence_token_the_whole_turn_counts(tmp_path):
    template = (
        "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    dataset = SFTDataset(write(tmp_path / "a.parquet", talk("h", "xyz")), letter_tokenizer(template), CONFIG)
    assert both(dataset) == (ids("uhaxyz"), [0, 0, 0, 1, 1, 1])


def test_a_template_that_rewrites_earlier_turns_is_refused_with_a_hint(tmp_path):
    # the assistant's earlier turns are left empty, as by templates that drop earlier thoughts
    template = PLAIN.replace("{{ m['content'] + '>' }}", "{{ (m['content'] if loop.last else '') + '>' }}", 1)
    file = write(tmp_path / "a.parquet", talk("a", "b"), talk("a", "b", "c", "d"))
    with pytest.raises(DataError, match=r"a.parquet row 1 message 1: .*\{% generation %\}"):
        SFTDataset(file, letter_tokenizer(template), CONFIG)


def test_a_generation_prompt_that_the_turn_does_not_begin_with_is_refused(tmp_path):
    template = PLAIN.replace("{{ '<a' }}", "{{ '<a think' }}")
    with pytest.raises(DataError, match="a.parquet row 0 message 1"):
        SFTDataset(write(tmp_path / "a.parquet", talk("a", "b")), letter_tokenizer(template), CONFIG)


# talk("ab", "cd") is <uab> <acd>·: 12 tokens, the assistant's are the 9th to the 11th.


def test_a_longer_conversation_is_refused_with_row_length_limit_and_the_keys_to_change(tmp_path):
    file = write(tmp_path / "a.parquet", talk("a", "c"), talk("ab", "cd"))
    with pytest.raises(DataError) as refused:
        SFTDataset(file, letter_tokenizer(), SFTDataConfig(max_length=10))
    message = str(refused.value)
    assert (
        f"{file} row 1: a conversation of 12 tokens is longer than data.max_length=10 (1 of 2 are, the longest has 12)"
        in message
    )
    assert "data.truncation" in message


@pytest.mark.parametrize(
    ("side", "tokens", "mask"), [("left", "> <acd> ", "00001110"), ("right", "<uab> <ac", "000000001")]
)
def test_a_longer_conversation_is_cut_together_with_its_mask(tmp_path, side, tokens, mask):
    config = SFTDataConfig(max_length=len(tokens), truncation=side)
    dataset = SFTDataset(write(tmp_path / "a.parquet", talk("ab", "cd")), letter_tokenizer(), config)
    assert both(dataset) == (ids(tokens), [int(digit) for digit in mask])


def test_a_cut_that_leaves_no_assistant_token_is_counted_in_the_log(tmp_path, caplog):
    file = write(tmp_path / "a.parquet", talk("ab", "cd"), talk("abcdefgh", "cd"))
    dataset = SFTDataset(file, letter_tokenizer(), SFTDataConfig(max_length=10, truncation="right"))
    assert len(dataset) == 2 and sum(both(dataset, 1)[1]) == 0
    assert "no assistant token within data.max_length=10" in caplog.text


def test_the_filter_leaves_longer_conversations_out_and_logs_how_many(tmp_path, caplog):
    file = write(tmp_path / "a.parquet", talk("ab", "cd"), talk("a", "c"))
    with caplog.at_level(logging.INFO):
        dataset = SFTDataset(file, letter_tokenizer(), SFTDataConfig(max_length=10, truncation="filter"))
    assert len(dataset) == 1 and both(dataset)[0] == ids("<ua> <ac> ")
    assert "1 of 2 conversations, which are longer" in caplog.text
    with pytest.raises(DataError, match="no conversations are left of 2 rows"):
        SFTDataset(file, letter_tokenizer(), SFTDataConfig(max_length=3, truncation="filter"))


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["by markers", "by turns"])
def test_a_conversation_without_an_assistant_is_refused_with_its_row(tmp_path, template):
    with pytest.raises(DataError, match="a.parquet row 1: .*no assistant tokens"):
        SFTDataset(write(tmp_path / "a.parquet", talk("a", "b"), talk("a")), letter_tokenizer(template), CONFIG)


@pytest.mark.parametrize("conversation", [None, [], [{"role": "user"}], "hi"])
def test_a_value_that_is_not_a_conversation_is_refused_with_its_row(tmp_path, conversation):
    with pytest.raises(DataError, match="a.parquet row 0: expected"):
        SFTDataset(write(tmp_path / "a.parquet", conversation), letter_tokenizer(), CONFIG)


def test_a_missing_column_and_a_missing_template_are_named(tmp_path):
    file = write(tmp_path / "a.parquet", talk("a", "b"), key="chat")
    with pytest.raises(DataError, match=r"a.parquet .*'messages' \(data.messages_key\); .*chat"):
        SFTDataset(file, letter_tokenizer(), CONFIG)
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        SFTDataset(file, letter_tokenizer(None), SFTDataConfig(messages_key="chat"))


def test_keys_that_only_other_messages_have_do_not_reach_the_template(tmp_path):
    template = (
        "{% for m in messages %}{{ 'x' if m.name is defined else 'y' }}{% endfor %}{% generation %}{{ 'z' "
        "}}{% endgeneration %}"
    )
    file = write(
        tmp_path / "a.parquet", [{"role": "user", "content": "a", "name": "Jo"}, {"role": "assistant", "content": "b"}]
    )
    assert both(SFTDataset(file, letter_tokenizer(template), CONFIG)) == (ids("xyz"), [0, 0, 1])


def test_a_batch_is_padded_on_the_right_and_predicts_the_tokens_after_the_first(tmp_path):
    dataset = SFTDataset(write(tmp_path / "a.parquet", talk("a", "b"), talk("a", "bcd")), letter_tokenizer(), CONFIG)
    batch = collate_sequences([dataset[0], dataset[1]], pad_token_id=0).batch
    assert batch["input_ids"].tolist() == [ids("<ua> <ab> __"), ids("<ua> <abcd> ")]
    assert batch["attention_mask"].tolist() == [[1] * 10 + [0] * 2, [1] * 12]
    assert batch["position_ids"].tolist() == [[*range(10), 9, 9], list(range(12))]
    assert batch["responses"].tolist() == [ids("ua> <ab> __"), ids("ua> <abcd> ")]
    assert batch["response_mask"].tolist() == [[0] * 6 + [1, 1, 0, 0, 0], [0] * 6 + [1, 1, 1, 1, 0]]
    assert {str(column.dtype) for column in batch.values()} == {"torch.int64"}


def test_conversations_come_in_the_loaders_order_and_continue_after_a_stop(tmp_path):
    dataset = SFTDataset(
        write(tmp_path / "a.parquet", *(talk("q", letter) for letter in "abcdefg")), letter_tokenizer(), CONFIG
    )

    def loader() -> PromptLoader:
        return PromptLoader(dataset, batch_size=3, shuffle=True, seed=1, collate=dataset.collate)

    def answers(loader: PromptLoader, num_batches: int) -> list[str]:
        texts = [
            dataset.tokenizer.decode(ids) for _ in range(num_batches) for ids in loader.next_batch().batch["input_ids"]
        ]
        return [re.search("<a(.)>", text)[1] for text in texts]

    first = loader()
    before = answers(first, 4)
    second = loader()
    second.load_state_dict(first.state_dict())
    after = answers(second, 2)
    assert sorted(before[:7]) == list("abcdefg") and sorted(before[7:] + after) == list("abcdefg")
    assert before + after == answers(loader(), 6)
