"""Tool calls in the text of three model families."""

import pytest

from hybridrl.serving.openai.tool_calls import FORMATS, Call, detect_format
from tests.support.serving.chat_templates import FAMILIES, tokenizer_of

ADD, FIND = Call("add", '{"a": 1}'), Call("find", "{}")
J_ADD, J_FIND = '{"name": "add", "arguments": {"a": 1}}', '{"name": "find", "arguments": {}}'
HERMES = f"<tool_call>\n{J_ADD}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "It is 5.", "It is 5.", []),
        ("hermes", f"I see.\n{HERMES}\n<tool_call>{J_FIND}</tool_call>", "I see.", [ADD, FIND]),
        ("hermes", "<tool_call>add 1</tool_call>", "<tool_call>add 1</tool_call>", []),
        ("hermes", f"{HERMES}<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", [ADD]),
        ("hermes", f"<tool_call>{J_ADD}", f"<tool_call>{J_ADD}", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', None, []),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ("llama3_json", f'<|python_tag|>{J_ADD}; {{"name": "find", "parameters": {{}}}}', "", [ADD, FIND]),
        ("llama3_json", '{"answer": 5}', None, []),
        ("llama3_json", f"Well: {J_ADD}", None, []),
        ("llama3_json", f"{J_ADD} and more", None, []),
        ("mistral", f"[TOOL_CALLS] [{J_ADD}, {J_FIND}]", "", [ADD, FIND]),
        ("mistral", 'So. [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]find[ARGS]{}', "So.", [ADD, FIND]),
        ("mistral", f"[TOOL_CALLS] [{J_ADD}, 5]", None, []),
        ("mistral", "[TOOL_CALLS] []", None, []),
    ],
)
def test_calls_are_read_and_what_is_none_stays_text(name, text, content, calls):
    assert FORMATS[name].parse(text) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"I see. < 5 <tool {HERMES} done {HERMES}"),
        ("hermes", "I see.\n\n<tool_cal"),
        ("llama3_json", f"  {J_ADD}"),
        ("llama3_json", "It is {5}."),
        ("mistral", f"So be it. [TOOL_CALLS][{J_ADD}]"),
    ],
)
def test_what_a_stream_has_shown_begins_the_whole_text(name, text):
    content, shown = FORMATS[name].parse(text)[0], ""
    for length in range(len(text)):
        visible = FORMATS[name].visible(text[:length])
        shown = visible if visible.startswith(shown) else shown
        assert content.startswith(shown), length
    assert shown.strip() or not content.strip()


def test_the_format_is_that_of_the_chat_template(tiny_tokenizer):
    found = {family: detect_format(tokenizer_of(family, tiny_tokenizer)) for family in FAMILIES}
    assert found == {"qwen": FORMATS["hermes"], "llama3": FORMATS["llama3_json"], "mistral": FORMATS["mistral"]}
    assert detect_format(tiny_tokenizer) is FORMATS["hermes"]
