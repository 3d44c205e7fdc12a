"""The Responses API by OpenAI's own client: items, functions, stored answers, events."""

import json

import pytest

from hybridrl.serving.openai.apis import responses
from hybridrl.serving.sessions.rows import session_rows
from tests.support.serving.scripted_policy import Script

openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": False}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
QUESTION = [{"role": "user", "content": [{"type": "input_text", "text": "How many?"}]}]


@pytest.mark.parametrize("given", ["How many?", QUESTION])
def test_an_answer_is_that_of_a_chat_with_the_same_messages(site, given):
    sampled = {"model": "tiny", "extra_body": {"seed": 5, "ignore_eos": True}}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    chat = site.client.chat.completions.create(messages=asked, max_tokens=9, **sampled)
    answer = site.client.responses.create(input=given, instructions="Be brief.", max_output_tokens=9, **sampled)
    assert answer.output_text == chat.choices[0].message.content and answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    counts = answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens
    assert counts == (chat.usage.prompt_tokens, 9, chat.usage.total_tokens) and answer.weights_version == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_functions_are_called_and_their_outputs_continue_the_tokens_that_were_drawn(site, is_streamed):
    session, script = site.open_episode([f"I look. {CALL}{CALL.replace('1', '5')}", "It is 3."])
    client, given = site.client_of(session.name), [*QUESTION]
    asked = {"model": "tiny", "tools": TOOLS, "instructions": "Be brief."}
    if is_streamed:
        with client.responses.stream(input=given, **asked) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(input=given, **asked)
    text, *calls = answer.output
    assert answer.output_text == "I look." and (text.type, answer.status) == ("message", "completed")
    assert [json.loads(call.arguments)["a"] for call in calls] == [1, 5] and calls[0].name == "add"
    given += [item.model_dump(exclude_none=True) for item in answer.output]
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    assert client.responses.create(input=given, **asked).output_text == "It is 3."
    assert [turn.kind for turn in session.turns] == ["first", "continued"]
    [row] = session_rows(session.turns)
    assert row.prompt_ids + row.response_ids == [*script.requests[-1].prompt_ids, *session.turns[1].token_ids]
    drawn = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask]
    assert drawn == [token for turn in session.turns for token in turn.token_ids]


def test_a_conversation_that_a_chat_has_begun_goes_on(site):
    session, _ = site.open_episode([CALL, "It is 3."])
    client, asked = site.client_of(session.name), {"role": "user", "content": "How many?"}
    message = client.chat.completions.create(model="tiny", messages=[asked], tools=CHAT_TOOLS).choices[0].message
    [call] = message.tool_calls
    items = [{"type": "function_call", "call_id": call.id, "name": "add", "arguments": call.function.arguments}]
    items += [{"type": "function_call_output", "call_id": call.id, "output": [{"type": "input_text", "text": "3"}]}]
    client.responses.create(model="tiny", input=[asked, *items], tools=TOOLS)
    assert [turn.kind for turn in session.turns] == ["first", "continued"]


def test_a_stored_answer_is_continued_by_its_id(site, monkeypatch):
    session, _ = site.open_episode(["one", "two", "three", "four"])
    client = site.client_of(session.name)
    first = client.responses.create(model="tiny", input="a", instructions="Be brief.")
    second = client.responses.create(
        model="tiny", input="b", instructions="Be brief.", previous_response_id=first.id, metadata={"x": "y"}
    )
    assert (second.output_text, second.previous_response_id, second.metadata) == ("two", first.id, {"x": "y"})
    assert [turn.kind for turn in session.turns] == ["first", "continued"]
    monkeypatch.setattr(responses, "MAX_STORED", 1)
    unstored = client.responses.create(model="tiny", input="c", previous_response_id=second.id, store=False)
    client.responses.create(model="tiny", input="d", previous_response_id=second.id)
    for lost in (unstored, first, second):
        with pytest.raises(openai.BadRequestError, match="no such answer, or it was not stored") as refused:
            client.responses.create(model="tiny", input="e", previous_response_id=lost.id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_stream_has_the_documented_events_in_their_order(site):
    session, _ = site.open_episode([f"I look again and again and again, for long. {CALL}"])
    client = site.client_of(session.name)
    events = list(client.responses.create(model="tiny", input="a", tools=TOOLS, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "I look again and again and again, for long." and len(deltas) > 1
    text = ["output_item.added", "content_part.added", "output_text.delta"]
    text += ["output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    once = [kind for place, kind in enumerate(kinds) if kind != "output_text.delta" or kinds[place - 1] != kind]
    assert once == ["created", "in_progress", *text, *call, "completed"]
    final = events[-1].response
    assert [item.type for item in final.output] == ["message", "function_call"] and final.usage.output_tokens > 20
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == final.output and [event.output_index for event in done] == [0, 1]


class Broken(Script):
    async def generate(self, request, *, conversation=None):
        if self.requests:
            raise ValueError("of the policy")
        return await super().generate(request, conversation=conversation)


def test_a_stream_that_fails_says_so(site):
    session, _ = site.open_episode([])
    object.__setattr__(session.episode, "client", Broken(site.served.tokenizer, ["x" * 100]))
    *_, last = site.client_of(session.name).responses.create(model="tiny", input="a", stream=True)
    assert last.type == "response.failed" and last.response.error.message == "ValueError: of the policy"
    assert session.turns == []


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"input": None}, "input", "input is missing"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "items are messages, function_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "'input_image' is not supported",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "is not supported"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "samples freely"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0: must be 1 or more"),
        ({"background": True}, "background", "is not supported by this endpoint"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "is not supported by this endpoint"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "is not supported by this endpoint"),
        ({"truncation": "auto"}, "truncation", "is not supported by this endpoint"),
        ({"max_tokens": 5}, "max_tokens", "there is no parameter 'max_tokens'"),
        ({"store": "yes"}, "store", "must be of type bool"),
        ({"temperature": -1}, "temperature", "must be in"),
    ],
)
def test_a_parameter_that_is_not_supported_is_named(site, changes, param, message):
    body = {"model": "tiny", "input": "How many?"} | changes
    status, answer, _ = site.post("/v1/responses", json.dumps(body).encode())
    assert status == 400 and answer["error"]["param"] == param and message in answer["error"]["message"]


def test_stored_calls_count_and_the_oldest_answers_make_room(site, monkeypatch):
    session, _ = site.open_episode(["one", "two"])
    client = site.client_of(session.name)
    monkeypatch.setattr(responses, "MAX_STORED_CHARACTERS", 500)
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": json.dumps({"a": "1" * 100})}
    found = [{"role": "user", "content": "a"}, call, {"type": "function_call_output", "call_id": "c", "output": "3"}]
    stored = site.endpoint._responses
    for _ in range(2):
        client.responses.create(model="tiny", input=found, tools=TOOLS)
    assert len(stored._stored) == 1 and 250 < stored._num_characters < 500


def test_metadata_that_is_nested_too_deeply_is_rejected(site):
    nested = '{"a":' * 980 + "1" + "}" * 980
    body = f'{{"model": "tiny", "input": "a", "metadata": {nested}}}'.encode()
    status, answer, _ = site.post("/v1/responses", body)
    assert status == 400 and "nested too deeply" in answer["error"]["message"]
