"""The quick start's model: the properties of tokenizer and weights that a training run needs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_preprocess import arithmetic
from examples.quickstart import build_model

QUESTION = "Tom packs 5 red and 5 blue nuts in each of 6 bags. How many nuts is that?"
ANSWER = "<<5+5=10>> <<10*6=60>> #### 60"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("model")
    assert (
        arithmetic.main(["--local_dir", str(data), "--num_train", "10", "--num_test", "10", "--num_sft_train", "3000"])
        == 0
    )
    assert build_model.main(["--data", str(data), "--out", str(out)]) == 0
    return data, out


@pytest.fixture(scope="module")
def tokenizer(directories):
    return AutoTokenizer.from_pretrained(directories[1])


def test_the_model_is_small_tied_and_in_float32(directories, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(directories[1])
    assert model.num_parameters() == pytest.approx(0.38e6, rel=0.02)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.dtype == torch.float32 and model.config.vocab_size == len(tokenizer) <= 512
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_seed_decides_the_weights(directories, tokenizer):
    first, same, other = (build_model.make_model(tokenizer, seed=seed).model.embed_tokens.weight for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)
    saved = AutoModelForCausalLM.from_pretrained(directories[1])
    assert torch.equal(saved.model.embed_tokens.weight, first)


def test_any_text_survives_encoding_and_every_digit_is_a_token(tokenizer):
    for text in (QUESTION, ANSWER, "12,345 = 日本 é\n\t 'x'"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("12 <<345")[:2] == ["1", "2"] and tokenizer.tokenize("345") == ["3", "4", "5"]


def test_prompts_and_responses_fit_the_lengths_in_the_quick_start(tokenizer):
    turn = {"role": "user", "content": QUESTION}
    prompt = tokenizer.apply_chat_template([turn], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert len(prompt) <= 40 and len(tokenizer.encode(ANSWER)) + 1 <= 26


def test_the_markers_of_the_template_are_around_the_answer_and_its_end(tokenizer):
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    rendered = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == f"{ANSWER}<|im_end|>"
    assert marked[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_missing_data_is_one_line_with_the_command_that_makes_it(tmp_path, capsys):
    assert build_model.main(["--data", str(tmp_path), "--out", str(tmp_path / "model")]) == 2
    assert "python -m data_preprocess.arithmetic --local_dir" in capsys.readouterr().err
