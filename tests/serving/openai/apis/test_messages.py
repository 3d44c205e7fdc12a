"""Anthropic's Messages API by Anthropic's own client: blocks, tools, events, errors, counts of tokens."""

import json
from functools import partial

import pytest

from hybridrl.serving.sessions.rows import session_rows

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
QUESTION = {"role": "user", "content": [{"type": "text", "text": "How many?", "cache_control": {"type": "ephemeral"}}]}


@pytest.fixture(scope="module")
def anthropic():
    """The package. It takes seconds to import, and every process of the tests collects this file."""
    return pytest.importorskip("anthropic", reason="Anthropic's client is not installed; vLLM brings it")


@pytest.fixture
def client_of(anthropic):
    return partial(connect, anthropic)


def connect(anthropic, site, session: str | None = None, **changes):
    url = f"http://127.0.0.1:{site.endpoint.port}" if session is None else site.url(session)
    return anthropic.Anthropic(base_url=url, **({"api_key": "none", "max_retries": 0, "timeout": 60} | changes))


def test_an_answer_is_that_of_a_chat_with_the_same_messages(site, client_of):
    sampled = {"model": "tiny", "max_tokens": 9}
    extra = {"top_p": 0.9, "temperature": 0.8, "top_k": 20, "seed": 5, "ignore_eos": True}  # the client lacks them
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    chat = site.client.chat.completions.create(messages=asked, **sampled, extra_body=extra)
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    answer = client_of(site).messages.create(
        messages=[QUESTION], system=system, extra_body=extra, metadata={"user_id": "u"}, **sampled
    )
    [block] = answer.content
    assert block.text == chat.choices[0].message.content and answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("max_tokens", None, "assistant")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 9)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_are_used_and_their_results_continue_the_tokens_that_were_drawn(site, is_streamed, client_of):
    session, script = site.open_episode([f"I look. {CALL}{CALL.replace('1', '5')}", "It is 3."])
    client, messages = client_of(site, session.name), [QUESTION]
    asked = {"model": "tiny", "max_tokens": 250, "tools": TOOLS, "system": "Be brief."}
    if is_streamed:
        with client.messages.stream(messages=messages, **asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(messages=messages, **asked)
    text, *uses = answer.content
    assert (text.text, answer.stop_reason) == ("I look.", "tool_use")
    assert [(use.name, use.input["a"]) for use in uses] == [("add", 1), ("add", 5)]
    counted = {name: value for name, value in asked.items() if name != "max_tokens"}
    assert client.messages.count_tokens(messages=messages, **counted).input_tokens == answer.usage.input_tokens
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "3", "is_error": False} for use in uses]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    number = client.messages.count_tokens(messages=messages, **counted).input_tokens
    last = client.messages.create(messages=messages, **asked)
    assert (last.content[0].text, last.stop_reason, last.usage.input_tokens) == ("It is 3.", "end_turn", number)
    assert [turn.kind for turn in session.turns] == ["first", "continued"]
    [row] = session_rows(session.turns)
    assert row.prompt_ids + row.response_ids == [*script.requests[-1].prompt_ids, *session.turns[1].token_ids]


def test_a_conversation_that_a_chat_has_begun_goes_on(site, client_of):
    session, script = site.open_episode([CALL, "It is 3."])
    asked = {"role": "user", "content": "How many?"}
    chat = site.client_of(session.name).chat.completions
    [call] = chat.create(model="tiny", messages=[asked], tools=CHAT_TOOLS).choices[0].message.tool_calls
    use = {"type": "tool_use", "id": call.id, "name": "add", "input": json.loads(call.function.arguments)}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
    then = [{"role": "assistant", "content": [use]}]
    then += [{"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}]
    client_of(site, session.name).messages.create(model="tiny", max_tokens=20, messages=[asked, *then], tools=TOOLS)
    assert [turn.kind for turn in session.turns] == ["first", "continued"]
    text = site.served.tokenizer.decode(script.requests[-1].prompt_ids)
    assert text.index("<tool_response>\n3") < text.index("And now?")


def test_a_stop_text_ends_an_answer_and_is_named(site, client_of):
    session, _ = site.open_episode(["one, two, three"])
    answer = client_of(site, session.name).messages.create(
        model="tiny", max_tokens=5, messages=[QUESTION], stop_sequences=["!"]
    )
    assert answer.stop_reason == "max_tokens"
    asked = {"model": "tiny", "messages": [QUESTION], "max_tokens": 60, "extra_body": {"seed": 8}}
    free = client_of(site).messages.create(**asked).content[0].text
    stop = free[10:13]
    whole = client_of(site).messages.create(**asked, stop_sequences=[stop])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert whole.content[0].text == free[: free.index(stop)]


def test_a_stream_has_the_documented_events_in_their_order(site, client_of):
    session, _ = site.open_episode([f"I look again and again and again, for long. {CALL}"])
    stream = client_of(site, session.name).messages.create(
        model="tiny", max_tokens=200, messages=[QUESTION], tools=TOOLS, stream=True
    )
    events = list(stream)
    kinds = [event.type for event in events]
    once = [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    texts = [delta.text for delta in deltas if delta.type == "text_delta"]
    assert "".join(texts) == "I look again and again and again, for long." and len(texts) > 1
    assert json.loads(deltas[-1].partial_json) == {"a": 1, "b": 2}
    assert events[-2].delta.stop_reason == "tool_use" and events[-2].usage.output_tokens > 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 10**6}, "asks for 1000000 more"),
        ({"messages": []}, "messages is missing"),
        ({"messages": ["hi"]}, "is not a message"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "It"}]}, "an answer cannot be begun"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools: .* is not supported"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice=.* samples freely"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking=.* is not supported by this endpoint"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_p": 2}, "top_p=2: must be in"),
        ({"stop": "x"}, "there is no parameter 'stop'"),
    ],
)
def test_a_parameter_that_is_not_supported_is_named_in_an_error_of_this_api(
    anthropic, site, changes, message, client_of
):
    body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 8} | changes
    with pytest.raises(anthropic.BadRequestError, match=message) as refused:
        client_of(site).post("/v1/messages", body=body, cast_to=object)
    assert refused.value.body["type"] == "error" and refused.value.body["error"]["type"] == "invalid_request_error"


def test_other_errors_have_this_apis_types(anthropic, site, monkeypatch, client_of):
    asked = {"model": "gpt", "max_tokens": 5, "messages": [QUESTION]}
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'gpt'") as refused:
        client_of(site).messages.create(**asked)
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        client_of(site).messages.count_tokens(model="gpt", messages=[QUESTION])
    monkeypatch.setattr(site.endpoint, "_api_key", "secret")
    with pytest.raises(anthropic.AuthenticationError, match="HYBRIDRL_API_KEY") as refused:
        client_of(site).messages.create(**asked)
    assert refused.value.body["error"]["type"] == "authentication_error"
    own = asked | {"model": "tiny"}
    assert client_of(site, api_key="secret").messages.create(**own).role == "assistant"
    assert client_of(site, api_key=None, auth_token="secret").messages.create(**own).role == "assistant"
