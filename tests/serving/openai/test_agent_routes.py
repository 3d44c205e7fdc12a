"""Sessions and tools through the endpoint, by OpenAI's own client: on a tiny model, and on scripted answers."""

import json

import pytest

from hybridrl.serving.sessions.session import Session
from tests.support.serving.scripted_policy import RESPONSE, Script

openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")

from tests.support.serving.site import Site  # noqa: E402 - it imports openai

QUESTION = {"role": "user", "content": "How many?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def open_episode(
    site: Site, answers: list[str], *, response: int = RESPONSE
) -> tuple[Session, Script, "openai.OpenAI"]:
    session, script = site.open_episode(answers, response=response)
    return session, script, site.client_of(session.name)


def read(site: Site, session: str) -> dict:
    return json.loads(
        site.client_of(session)
        .with_options(base_url=site.client.base_url)
        .get(f"http://127.0.0.1:{site.endpoint.port}/sessions/{session}", cast_to=str)
    )


def test_a_session_returns_what_the_engine_read_and_drew(site):
    client, messages, prompt = site.client_of("talk"), [QUESTION], []
    drawn: list[list[int]] = []
    for turn in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=20,
            seed=turn,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        [choice] = answer.choices
        assert choice.prompt_token_ids[: len(prompt)] == prompt  # what was drawn before is read as it is
        prompt = choice.prompt_token_ids + choice.token_ids
        drawn.append(choice.token_ids)
        messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": f" And {turn}? "}]
        log_probs = [entry.logprob for entry in choice.logprobs.content]
    found = read(site, "talk")
    [row] = found["rows"]
    assert row["prompt_ids"] + row["response_ids"] == prompt and found["counts"] == {"first": 1, "continued": 2}
    sampled = [token for token, mask in zip(row["response_ids"], row["response_mask"], strict=True) if mask]
    assert sampled == sum(drawn, []) and row["response_logprobs"][-len(log_probs) :] == log_probs
    assert {*row["token_versions"]} == {0, -1}


def test_the_header_names_a_session_too(site):
    for _ in range(2):
        site.client.chat.completions.create(
            model="tiny", messages=[QUESTION], max_tokens=2, extra_headers={"X-Session-Id": "by-header"}
        )
    found = read(site, "by-header")
    assert found["counts"] == {"first": 1, "resampled": 1} and len(found["rows"]) == 2
    site.client.delete(f"http://127.0.0.1:{site.endpoint.port}/sessions/by-header", cast_to=str)
    assert read(site, "by-header")["rows"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_as_calls_and_their_answers_continue_the_tokens(site, stream):
    session, script, client = open_episode(site, [f"I look. {CALL}{CALL.replace('1', '5')}", "It is 3."])
    asked = {"model": "tiny", "tools": TOOLS, "temperature": 1.7}
    if stream:
        events = [
            event.choices[0] for event in client.chat.completions.create(messages=[QUESTION], stream=True, **asked)
        ]
        parts = [call for event in events for call in event.delta.tool_calls or []]
        calls = [{"id": part.id, "type": part.type, "function": part.function.model_dump()} for part in parts]
        content = "".join(event.delta.content or "" for event in events)
        assert [part.index for part in parts] == [0, 1] and events[-1].finish_reason == "tool_calls"
        assert len(script.requests) > 3 and all("<tool" not in (event.delta.content or "") for event in events)
    else:
        [choice] = client.chat.completions.create(messages=[QUESTION], **asked).choices
        calls = [call.model_dump() for call in choice.message.tool_calls]
        content = choice.message.content
        assert choice.finish_reason == "tool_calls"
    assert content == "I look." and [json.loads(call["function"]["arguments"])["a"] for call in calls] == [1, 5]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
    messages = [QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}, *answers]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].message.content == "It is 3."
    tokenizer, last = site.served.tokenizer, script.requests[-1]
    first = script.requests[0].prompt_ids
    assert tokenizer.decode(last.prompt_ids[len(first) :]).startswith(f"I look. {CALL}")  # as it was drawn
    assert tokenizer.decode(last.prompt_ids).endswith("3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert last.sampling.temperature == 0.5  # of the training batch
    assert [turn.kind for turn in session.turns] == ["first", "continued"]


def test_a_malformed_call_stays_text_and_one_call_can_be_asked_for(site):
    broken = '<tool_call>{"name": "add", </tool_call>'
    _, _, client = open_episode(site, [broken, CALL + CALL, CALL])
    asked = {"model": "tiny", "messages": [QUESTION], "tools": TOOLS}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.content, message.tool_calls) == (broken, None)
    assert len(client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    message = client.chat.completions.create(**asked, tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)


def test_a_conversation_without_room_for_an_answer_is_refused(site):
    session, script, client = open_episode(site, ["x" * 50, "y"], response=16)
    first = client.chat.completions.create(model="tiny", messages=[QUESTION], max_tokens=4000).choices[0]
    assert first.finish_reason == "length" and script.requests[0].sampling.max_new_tokens == 16
    messages = [QUESTION, first.message.model_dump(exclude_none=True), QUESTION]
    known = "This model's maximum context length is"  # by these words litellm knows that no retry helps
    with pytest.raises(openai.BadRequestError, match=f"{known} .*no room for an answer") as refused:
        client.chat.completions.create(model="tiny", messages=messages)
    assert refused.value.code == "context_length_exceeded" and session.was_full


def test_an_agent_that_puts_the_stop_text_back_continues_the_answer(site):
    session, script, client = open_episode(site, ["<code>1", "<code>2", "done"])
    script.answers[0] += "</code> and more"  # a client may want the text whole
    asked = {"model": "tiny", "stop": ["</code>"]}
    first = client.chat.completions.create(messages=[QUESTION], **asked).choices[0].message.content
    messages = [QUESTION, {"role": "assistant", "content": f"{first}</code>"}, {"role": "user", "content": "1"}]
    client.chat.completions.create(messages=messages, **asked)
    assert first == "<code>1" and [turn.kind for turn in session.turns] == ["first", "continued"]
    other = [QUESTION, {"role": "assistant", "content": f"{first}</code>!"}, {"role": "user", "content": "1"}]
    client.chat.completions.create(messages=other, **asked)
    assert session.turns[-1].kind == "edited"


FORMAT = {"type": "json_schema", "name": "out", "schema": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "add"}}
FOR_RESPONSES = {"input": "How many?", "tools": [TOOLS[0]["function"] | {"type": "function"}]}
FOR_MESSAGES = {
    "messages": [QUESTION],
    "max_tokens": 100,
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
}


@pytest.mark.parametrize(
    "path, body",
    [
        ("chat/completions", {"messages": [QUESTION], "tools": TOOLS, "tool_choice": "required"}),
        ("chat/completions", {"messages": [QUESTION], "tools": TOOLS, "tool_choice": NAMED}),
        ("chat/completions", {"messages": [QUESTION], "response_format": {"type": "json_object"}}),
        ("responses", FOR_RESPONSES | {"tool_choice": "required"}),
        ("responses", FOR_RESPONSES | {"text": {"format": FORMAT}}),
        ("messages", FOR_MESSAGES | {"tool_choice": {"type": "any"}}),
        ("messages", FOR_MESSAGES | {"tool_choice": {"type": "tool", "name": "add"}}),
    ],
)
def test_an_agent_in_training_may_demand_calls_and_formats_and_its_policy_samples_freely(site, path, body):
    session, _, _ = open_episode(site, ["I will not."])
    raw = json.dumps({"model": "tiny", **body}).encode()
    status, answer, _ = site.post(f"/sessions/{session.name}/v1/{path}", raw)
    assert status == 200 and "I will not." in json.dumps(answer) and len(session.turns) == 1
    status, answer, _ = site.post(f"/sessions/not-of-training/v1/{path}", raw)
    assert status == 400


def test_a_tool_choice_that_there_is_not_is_refused_in_training_too(site):
    session, _, _ = open_episode(site, ["x"])
    body = {"model": "tiny", "messages": [QUESTION], "tools": TOOLS, "tool_choice": "sometimes"}
    assert site.post(f"/sessions/{session.name}/v1/chat/completions", json.dumps(body).encode())[0] == 400


def test_a_reward_is_posted_and_an_ended_session_answers_nothing(site):
    session, _, client = open_episode(site, ["one", "two"])
    client.chat.completions.create(model="tiny", messages=[QUESTION])
    client.post("/reward", body={"reward": 0.75}, cast_to=str)
    assert session.reward == 0.75
    with pytest.raises(openai.BadRequestError, match="a finite one"):
        client.post("/reward", body={"reward": "good"}, cast_to=str)
    for number in (1e39, 10**4000):
        with pytest.raises(openai.BadRequestError, match="a finite one of float32"):
            client.post("/reward", body={"reward": number}, cast_to=str)
    with pytest.raises(openai.BadRequestError, match="no answer with the id 'chatcmpl-none'"):
        client.post("/reward", body={"reward": 1, "id": "chatcmpl-none"}, cast_to=str)
    with pytest.raises(openai.PermissionDeniedError, match="ends with its agent loop"):
        client.delete(f"http://127.0.0.1:{site.endpoint.port}/sessions/{session.name}", cast_to=str)
    site.endpoint.sessions.close(session.name)
    with pytest.raises(openai.APIStatusError, match="has ended") as ended:
        client.chat.completions.create(model="tiny", messages=[QUESTION])
    assert ended.value.status_code == 410


@pytest.mark.parametrize(
    "changes, param, message",
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "cannot be made to call a tool; use auto"),
        ({"tools": [{"name": "add"}]}, "tools", "is no tool"),
        ({"tools": TOOLS * 200}, "tools", "200 tools; at most 128"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages", "is no tool call"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "content=None must be a text"),
    ],
)
def test_requests_with_tools_that_cannot_be_served_are_rejected(site, changes, param, message):
    body = {"model": "tiny", "messages": [QUESTION]} | changes
    status, answer, _ = site.post("/sessions/mistakes/v1/chat/completions", json.dumps(body).encode())
    assert status == 400 and answer["error"]["param"] == param and message in answer["error"]["message"]


def test_a_session_needs_a_name_of_its_own(site):
    status, answer, _ = site.post("/sessions/a%20b/v1/chat/completions", b"{}")
    assert status == 400 and "letters, digits" in answer["error"]["message"]
