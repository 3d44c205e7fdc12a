"""The endpoint in front of one replica, called by OpenAI's own client.

Mistakes that the client rejects itself are sent by plain HTTP.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import pytest

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError
from hybridrl.serving.openai import Endpoint, ServedModel, server
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, batched_request_engine, make_rollout
from hybridrl.workers.rollout.base import load_special_tokens
from hybridrl.workers.rollout.sampling.sampler import sequence_keys

openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")

from tests.support.serving.site import Site  # noqa: E402 - it imports openai

PROMPT, RESPONSE = 64, 64


@pytest.fixture(scope="module")
def rollout(tiny_qwen2):
    tokens = load_special_tokens(str(tiny_qwen2))
    config = RolloutConfig(name="hf", dtype="float32")
    return make_rollout("hf", RolloutSetup(str(tiny_qwen2), config, tokens.eos_ids, tokens.pad_id, PROMPT, RESPONSE))


@pytest.fixture(scope="module")
def site(rollout, tiny_tokenizer) -> Iterator[Site]:
    found = Site(rollout, ServedModel("tiny", tiny_tokenizer, PROMPT + RESPONSE, RESPONSE, len(tiny_tokenizer)))
    yield found
    found.close()


def tokens_of(rollout, ids: list[int], sampling: SamplingParams, *, seed: int) -> list[list[int]]:
    """Return the tokens of one batched call: `sampling.n` samples."""
    import torch

    made = rollout.generate_tokens([ids], sequence_keys(torch.tensor([seed]), sampling.n), sampling)
    return [row[: int(mask.sum())].tolist() for row, mask in zip(made.tokens, made.mask, strict=True)]


def test_a_completion_has_the_tokens_of_a_batched_call_with_log_probs_and_versions(site, rollout, tiny_tokenizer):
    ids = tiny_tokenizer.encode("Tom buys 3 boxes")
    answer = site.client.completions.create(
        model="tiny",
        prompt="Tom buys 3 boxes",
        n=3,
        max_tokens=20,
        temperature=0.8,
        top_p=0.95,
        seed=11,
        logprobs=0,
        extra_body={"top_k": 50, "min_p": 0.01, "return_token_ids": True},
    )
    wanted = tokens_of(
        rollout, ids, SamplingParams(20, n=3, temperature=0.8, top_p=0.95, top_k=50, min_p=0.01), seed=11
    )
    assert [choice.token_ids for choice in answer.choices] == wanted and len({tuple(row) for row in wanted}) == 3
    for choice, row in zip(answer.choices, wanted, strict=True):
        assert choice.text == tiny_tokenizer.decode(row, skip_special_tokens=True)
        assert choice.prompt_token_ids == ids and choice.token_versions == [0] * len(row)
        assert len(choice.logprobs.token_logprobs) == len(row) and max(choice.logprobs.token_logprobs) < 0
        assert choice.logprobs.tokens == [tiny_tokenizer.decode([token]) for token in row]
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == sum(map(len, wanted))
    assert answer.weights_version == 0 and answer.system_fingerprint == "weights-0"


def test_token_ids_go_in_and_come_out_as_they_are(site, rollout):
    prompts = [[50, 60, 70], [80, 90]]
    answer = site.client.completions.create(
        model="tiny",
        prompt=prompts,
        max_tokens=9,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    greedy = SamplingParams(9, do_sample=False, ignore_eos=True)
    assert [choice.token_ids for choice in answer.choices] == [
        tokens_of(rollout, ids, greedy, seed=0)[0] for ids in prompts
    ]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]


def test_a_chat_is_rendered_by_the_chat_template(site, rollout, tiny_tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}]
    ids = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, return_dict=True
    )
    answer = site.client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=12, seed=5, logprobs=True
    )
    [row] = tokens_of(rollout, ids["input_ids"], SamplingParams(12), seed=5)
    assert answer.choices[0].message.content == tiny_tokenizer.decode(row, skip_special_tokens=True)
    assert answer.choices[0].message.role == "assistant"
    assert [len(answer.choices[0].logprobs.content), answer.usage.completion_tokens] == [len(row)] * 2
    unlimited = site.client.chat.completions.create(
        model="tiny", messages=messages, seed=5, extra_body={"ignore_eos": True}
    )
    assert unlimited.usage.completion_tokens == RESPONSE and unlimited.choices[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_stream_has_the_content_of_the_whole_answer_in_chunks(site, kind):
    parameters = {
        "model": "tiny",
        "n": 2,
        "max_tokens": 50,
        "seed": 3,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    if kind == "chat":
        call, parameters = (
            site.client.chat.completions.create,
            parameters | {"messages": [{"role": "user", "content": "How many?"}]},
        )
    else:
        call, parameters = site.client.completions.create, parameters | {"prompt": "Anna earns"}
    whole = call(**parameters)
    events = list(call(**parameters, stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage == whole.usage and events[-1].choices == []
    for wanted in whole.choices:
        parts = [choice for event in events for choice in event.choices if choice.index == wanted.index]
        texts = [part.delta.content if kind == "chat" else part.text for part in parts]
        assert (
            "".join(texts) == (wanted.message.content if kind == "chat" else wanted.text) and sum(map(bool, texts)) >= 3
        )
        assert [token for part in parts for token in getattr(part, "token_ids", [])] == wanted.token_ids
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


def test_a_stop_text_ends_an_answer_and_no_part_of_it_is_shown(site, tiny_tokenizer):
    parameters = {"model": "tiny", "prompt": "Anna earns", "max_tokens": 60, "seed": 8}
    parameters["extra_body"] = {"ignore_eos": False}
    free = site.client.completions.create(**parameters).choices[0].text
    stop = free[10:13]
    whole = site.client.completions.create(**parameters, stop=stop)
    assert whole.choices[0].text == free[: free.index(stop)] and whole.choices[0].finish_reason == "stop"
    events = site.client.completions.create(**parameters, stop=[stop], stream=True)
    streamed = [event.choices[0].text for event in events]
    assert "".join(streamed) == whole.choices[0].text


def test_the_model_is_listed_and_found_by_its_name(site):
    [model] = site.client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "hybridrl", PROMPT + RESPONSE)
    assert site.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'large'"):
        site.client.models.retrieve("large")
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here; use 'tiny'"):
        site.client.completions.create(model="gpt", prompt="x")


@pytest.mark.parametrize(
    "changes, param, message",
    [
        ({"temperature": -1}, "temperature", "must be in [0, 1000]"),
        ({"temperature": "hot"}, "temperature", "must be of type int or float"),
        ({"top_p": 0}, "top_p", "it must be in (0, 1]"),
        ({"n": 0}, "n", "one request may have 1 to 128 responses"),
        ({"n": True}, "n", "must be of type int"),
        ({"max_tokens": 0}, "max_tokens", "must be 1 or more"),
        (
            {"max_tokens": 65},
            "max_tokens",
            "context length is 128 tokens, at most 64 of them new; the request has 1 and asks for 65 more",
        ),
        ({"prompt": [50] * 128}, "prompt", "the request has 128 and asks for 1 more"),
        ({"prompt": [50, 4000]}, "prompt", "4000 is not a token id"),
        ({"prompt": [[50], ["x"]]}, "prompt", "'x' is not a token id"),
        ({"prompt": ""}, "prompt", "has no tokens"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"stop": [""]}, "stop", "non-empty strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1 is not a token id"),
        ({"logprobs": 3}, "logprobs", "only log-probs of the sampled tokens"),
        ({"seed": 2**64}, "seed", "64 bits"),
        ({"echo": True}, "echo", "is not supported by this endpoint"),
        ({"temprature": 1}, "temprature", "there is no parameter 'temprature'"),
    ],
)
def test_a_request_that_cannot_be_served_is_rejected_with_the_parameters_name(site, changes, param, message):
    body = {"model": "tiny", "prompt": [50]} | changes
    status, answer, _ = site.post("/v1/completions", json.dumps(body).encode())
    assert status == 400 and answer["error"]["param"] == param and message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_other_errors_have_openais_format_too(site):
    assert site.post("/v1/completions", b"{")[:2][0] == 400
    assert site.post("/v1/nothing", b"{}")[1]["error"]["type"] == "invalid_request_error"
    assert site.post("/v1/nothing", b"{}")[0] == 404
    with pytest.raises(openai.BadRequestError, match="is not a message"):
        site.client.chat.completions.create(model="tiny", messages=["hello"])
    with pytest.raises(openai.BadRequestError, match="takes text only"):
        image = {"type": "image_url", "image_url": {"url": "x"}}
        site.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [image]}])

    async def start_second():
        await Endpoint(site.router, site.served, host="127.0.0.1", port=site.endpoint.port).start()

    with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1"):
        site.run(start_second())


def test_a_request_waits_while_the_router_is_paused_and_continues_where_it_stopped(site, rollout, monkeypatch):
    monkeypatch.setattr(batched_request_engine, "CHUNK_TOKENS", 2)
    ids, answers = [50, 60, 70], []
    sampling = SamplingParams(60, ignore_eos=True)
    wanted = tokens_of(rollout, ids, sampling, seed=4)[0]
    generate = rollout.generate_tokens

    def generate_slowly(*args, **kwargs):
        time.sleep(0.05)  # otherwise a fast machine is done before the pause
        return generate(*args, **kwargs)

    monkeypatch.setattr(rollout, "generate_tokens", generate_slowly)

    def send_request() -> None:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answers.append(
            site.client.completions.create(model="tiny", prompt=ids, max_tokens=60, seed=4, extra_body=extra)
        )

    client_thread = threading.Thread(target=send_request)
    client_thread.start()
    while not site.router.table.load(0):
        pass
    site.run(site.router.pause())
    client_thread.join(0.3)
    assert client_thread.is_alive() and site.router.table.load(0) == 0 and not answers
    site.resume()
    client_thread.join(60)
    assert answers[0].choices[0].token_ids == wanted


def test_a_paused_and_a_full_endpoint_send_retry_after(site, monkeypatch):
    monkeypatch.setattr(server, "WEIGHTS_TIMEOUT_S", 0.1)
    body = json.dumps({"model": "tiny", "prompt": [50]}).encode()
    site.run(site.router.pause())
    try:
        status, answer, headers = site.post("/v1/completions", body)
    finally:
        site.resume()
    assert (
        status == 503 and headers["Retry-After"] == "10" and "train or load new weights" in answer["error"]["message"]
    )
    monkeypatch.setattr(server, "MAX_OPEN_RESPONSES", 0)
    status, answer, headers = site.post("/v1/completions", body)
    assert status == 429 and headers["Retry-After"] == "1" and answer["error"]["type"] == "rate_limit_error"


def test_responses_of_a_client_that_disconnects_are_aborted(site, monkeypatch):
    monkeypatch.setattr(batched_request_engine, "CHUNK_TOKENS", 1)
    parameters = {"model": "tiny", "prompt": [50], "n": 8, "max_tokens": 64, "extra_body": {"ignore_eos": True}}
    stream = site.client.completions.create(**parameters, stream=True)
    next(iter(stream))
    assert site.endpoint._num_open == 8
    stream.close()

    async def all_ended() -> bool:
        for _ in range(200):
            if site.endpoint._num_open == 0 and site.router.table.load(0) == 0:
                return True
            await asyncio.sleep(0.02)
        return False

    assert site.run(all_ended())
