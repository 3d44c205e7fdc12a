"""What follows an answer, as the chat templates of three families write it."""

import pytest

from hybridrl.serving.sessions.matching import BranchKind
from hybridrl.serving.sessions.prompts import render, text_after_answer
from hybridrl.serving.sessions.rows import session_rows
from hybridrl.serving.sessions.session import Session
from tests.support.serving.chat_clients import TOOLS
from tests.support.serving.chat_templates import tokenizer_of

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
CALLED = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*CALLED, {"role": "tool", "tool_call_id": "abcdefghi", "content": "5"}]
TALKED = [*ASKED, {"role": "assistant", "content": " <think>x</think> yo "}, {"role": "user", "content": "more"}]
AFTER = {
    "qwen": (
        "\n<|im_start|>user<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        "<|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        '[TOOL_RESULTS] {"content": "5", "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        "[INST] Be brief.\n\nmore[/INST]",
    ),
}


@pytest.mark.parametrize("family", AFTER)
def test_the_text_after_an_answer_is_that_of_the_template(family, tiny_tokenizer):
    tokenizer = tokenizer_of(family, tiny_tokenizer)
    cut = tokenizer.encode("yo", add_special_tokens=False)
    ended = [*cut, tokenizer.eos_token_id]
    for messages, tools, text in zip((ANSWERED, TALKED), (TOOLS, []), AFTER[family], strict=True):
        assert text_after_answer(tokenizer, messages, tools, answer=2, sampled=ended) == text
        assert text_after_answer(tokenizer, messages, tools, answer=2, sampled=cut) == tokenizer.eos_token + text
        assert render(tokenizer, messages, tools).endswith(tokenizer.eos_token + text)


def test_another_end_of_a_turn_that_was_sampled_counts_as_the_end(tiny_tokenizer):
    tokenizer = tokenizer_of("llama3", tiny_tokenizer)
    sampled = tokenizer.convert_tokens_to_ids(["<|python_tag|>", "<|eom_id|>"])
    text = text_after_answer(tokenizer, ANSWERED, TOOLS, answer=2, sampled=sampled)
    assert text == AFTER["llama3"][0]


def test_a_template_that_hides_earlier_answers_starts_a_row_of_its_own(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen", tiny_tokenizer)
    tokenizer.chat_template = "{{ messages[-1].content }}<|im_end|>"
    session, reply = Session("s"), {"role": "assistant", "content": "yo"}
    sampled = {"token_ids": [5], "log_probs": [-1.0], "versions": [0]}
    session.record(session.plan(ASKED, [], tokenizer), **sampled, reply=reply)
    session.record(session.plan([*ASKED, reply, ASKED[1]], [], tokenizer), **sampled, reply=reply)
    assert [turn.kind for turn in session.turns] == [BranchKind.FIRST, BranchKind.RENDERED]
    assert [sum(row.response_mask) for row in session_rows(session.turns)] == [1, 1]


def test_the_main_row_has_the_most_answers_and_is_no_sub_agent(tiny_tokenizer):
    tokenizer, session = tokenizer_of("qwen", tiny_tokenizer), Session("s")

    def ask(messages: list[dict]) -> list[dict]:
        reply = {"role": "assistant", "content": f"answer {len(session.turns)}"}
        ids = tokenizer.encode(reply["content"])
        given = {"token_ids": ids, "log_probs": [-1.0] * len(ids), "versions": [0] * len(ids)}
        session.record(session.plan(messages, [], tokenizer), **given, reply=reply)
        return [*messages, reply, {"role": "user", "content": "go on"}]

    first = ask(ASKED)
    sub_agent = [{"role": "system", "content": "You are a helper."}, {"role": "user", "content": "look"}]
    for _ in range(4):
        sub_agent = ask(sub_agent)
    ask(ask(first))
    rows = session_rows(session.turns)
    assert [row.turns for row in rows] == [[0, 5, 6], [1, 2, 3, 4]]


def test_options_of_the_template_hold_for_the_first_prompt_and_for_what_follows_an_answer(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen", tiny_tokenizer)
    tokenizer.chat_template += "{%- if add_generation_prompt and thoughts is false -%}<think></think>{%- endif -%}"
    options, ended = {"thoughts": False, "add_generation_prompt": False}, [5, tokenizer.eos_token_id]
    assert render(tokenizer, ASKED, [], options=options) == render(tokenizer, ASKED, []) + "<think></think>"
    after = text_after_answer(tokenizer, TALKED, [], answer=2, sampled=ended, options=options)
    assert after == AFTER["qwen"][1] + "<think></think>"
