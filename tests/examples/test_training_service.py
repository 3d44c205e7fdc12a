"""examples/training_service: the base model reads and ends prompts as the cookbook's renderer writes them."""

import pyarrow.parquet as pq
from transformers import AutoTokenizer

from examples.training_service import base_model, right_answers


def test_the_chat_template_writes_what_the_cookbooks_renderer_does(tmp_path, monkeypatch):
    monkeypatch.setattr(base_model, "NUM_ROWS", {"sft_train": 20, "sft_val": 2})
    assert base_model.main(["--out", str(tmp_path)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    [messages, *_] = pq.read_table(tmp_path / "sft_train.parquet")["messages"].to_pylist()
    assert tokenizer.apply_chat_template(messages, tokenize=False) == base_model.rendered(messages)
    text = tokenizer.apply_chat_template(messages[:4], tokenize=False)
    question, answer = messages[2]["content"], messages[3]["content"]
    numbers = [int(word) for word in question.removeprefix("What is ").removesuffix("?").split(" + ")]
    prompt = right_answers.PROMPT.format(*numbers)
    assert text == f"{prompt} {answer}\n\nUser:" and answer == str(sum(numbers))
    # The renderer encodes parts apart; the tokens are those of the whole text. Eight hold any answer and its end.
    parts = ["User:", " What is 4 + 5?\n\n", "Assistant:", " 9\n\n", "User:", f" {question}\n\n", "Assistant:"]
    apart = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    assert apart == tokenizer.encode(prompt, add_special_tokens=False)
    assert len(tokenizer.encode(" 200\n\nUser:", add_special_tokens=False)) <= 8
