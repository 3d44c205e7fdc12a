"""Images in chat messages give the tokens of a data file's row, or are refused."""

import asyncio
import base64
import io
from typing import Any

import numpy as np
import pytest

from examples.vision.build_model import build_model
from hybridrl.errors import DataError
from hybridrl.serving.agent_loop.tools.function_tools import call_tool
from hybridrl.serving.environments.environment_calls import sendable
from hybridrl.serving.openai.apis.messages import MessagesApi
from hybridrl.serving.openai.apis.responses import messages_of
from hybridrl.serving.openai.parameters import RequestError, ServedModel
from hybridrl.serving.openai.requests import parse_request
from hybridrl.serving.sessions.rows import session_rows
from hybridrl.serving.sessions.session import EpisodeLimits, Session
from hybridrl.trainer.data.images import messages_with_images
from hybridrl.workers.engine.image_model import pixels_of
from hybridrl.workers.images import content_text, image_of, with_images
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from tests.support.workers.image_cases import TEXTS, picture, read_processor

TEXT = {"type": "text", "text": "What is it ?"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> ServedModel:
    path = str(build_model(tmp_path_factory.mktemp("model"), texts=TEXTS))
    tokenizer, processor = read_processor(path)
    return ServedModel("tiny", tokenizer, 200, 64, len(tokenizer), processor=processor)


def png(seed: int) -> bytes:
    with io.BytesIO() as stream:
        picture(seed).save(stream, format="PNG")
        return stream.getvalue()


def text_of(seed: int) -> str:
    return base64.b64encode(png(seed)).decode()


def openai(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(seed)}", "detail": "auto"}}


def anthropic(seed: int) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text_of(seed)}}


def row_of(policy: ServedModel, *messages: tuple[str, list[int]]) -> tuple[list[int], Any]:
    """Return the tokens of user turns with pictures, as the prompt dataset makes them."""
    chat = [{"role": "user", "content": "<image>" * len(seeds) + text} for text, seeds in messages]
    images = [picture(seed) for _, seeds in messages for seed in seeds]
    parts = messages_with_images(chat, len(images), "row")
    tokens = policy.tokenizer.apply_chat_template(parts, add_generation_prompt=True, return_dict=False)
    found, inputs = policy.processor(np.array(tokens), images)
    return found.tolist(), inputs


def chat(policy: ServedModel, *messages: dict, session: Session | None = None, **more: Any) -> Any:
    body = {"model": "tiny", "messages": list(messages), **more}
    return parse_request(body, is_chat=True, policy=policy, name="r", session=session)


def user(*parts: Any) -> dict:
    return {"role": "user", "content": list(parts)}


def test_every_form_of_an_image_has_the_tokens_and_patches_of_a_data_files_row(policy):
    tokens, inputs = row_of(policy, ("What is it ?", [1]))
    item = {"role": "user", "content": [{"type": "input_image", "image_url": openai(1)["image_url"]["url"]}]}
    item["content"].append({"type": "input_text", "text": "What is it ?"})
    anthropics = {"model": "tiny", "max_tokens": 4, "messages": [user(anthropic(1), TEXT)]}
    for messages in (
        [user(openai(1), TEXT)],
        [user(anthropic(1), TEXT)],
        MessagesApi().to_chat(anthropics)["messages"],
        messages_of([item]),
    ):
        [request] = chat(policy, *messages).requests
        assert list(request.prompt_ids) == tokens
        assert np.array_equal(pixels_of(request.images), pixels_of(inputs))
        assert request.images["image_starts"].tolist() == inputs["image_starts"].tolist()
    assert content_text(picture(1), policy.processor) == content_text([picture(1)], policy.processor)
    assert image_of({"type": "image", "image": png(1)}) == png(1)


def test_the_turns_of_a_session_keep_their_images_and_become_one_row(policy):
    session = Session("s")
    first = user(openai(1), TEXT)
    one = chat(policy, first, session=session)
    answer = policy.tokenizer("a b <|im_end|>")["input_ids"]
    sampled = {"token_ids": answer, "log_probs": [-1.0] * 3, "versions": [0] * 3}
    session.record(one.plan, **sampled, reply={"role": "assistant", "content": "a b"})
    said, second = {"role": "assistant", "content": "a b"}, user(anthropic(2), TEXT)
    two = chat(policy, first, said, second, session=session)
    assert two.plan.parent == 0 and two.requests[0].prompt_ids[: len(one.plan.prompt_ids)] == one.plan.prompt_ids
    _, expected = row_of(policy, ("What is it ?", [1]), ("What is it ?", [2]))
    found = two.requests[0].images
    assert found["image_hashes"].tolist() == expected["image_hashes"].tolist()
    for start, number in zip(found["image_starts"], found["image_tokens"], strict=True):
        assert set(two.requests[0].prompt_ids[start : start + number]) == {policy.processor.token_id}
    session.record(two.plan, **sampled, reply={"role": "assistant", "content": "a b"})
    [row] = session_rows(session.turns)
    assert row.images["image_starts"].tolist() == found["image_starts"].tolist()
    other = chat(policy, user(openai(3), TEXT), said, second, session=session)  # the same text, another picture
    assert other.plan.parent is None and len(other.requests[0].images["image_tokens"]) == 2


def test_a_row_whose_prompt_is_cut_inside_an_image_keeps_its_tokens_and_images(policy):
    limits = EpisodeLimits(None, SamplingParams(8), 0, 0, 8, 64)  # type: ignore[arg-type]
    session = Session("s", limits)
    plan = chat(policy, user(openai(1), TEXT), session=session).plan
    session.record(plan, token_ids=[7], log_probs=[0.0], versions=[0], reply={"role": "assistant", "content": "a"})
    [row] = session_rows(session.turns, max_prompt_length=8)
    assert [*row.prompt_ids, *row.response_ids] == [*plan.prompt_ids, 7] and len(row.prompt_ids) == 8
    assert row.images["image_starts"].tolist() == plan.images["image_starts"].tolist()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}}, "are no image; formats"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "is no base64 text"),
        ({"type": "image_url"}, "nothing is fetched"),
        ({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/a"}}, "nothing is fetched"),
        ({"type": "image", "source": {"type": "base64", "data": 3}}, "is no base64 text"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, "'video_url' is not supported"),
        ({"type": "text", "text": "<|image_pad|>"}, "writes 1 times"),
    ],
)
def test_a_part_that_is_no_image_in_the_request_is_refused_with_a_sentence(policy, part, message):
    with pytest.raises(RequestError, match=message.replace("|", r"\|")) as refused:
        chat(policy, user(part, TEXT))
    assert refused.value.status == 400


def test_counts_and_sizes_of_images_are_limited(policy):
    with pytest.raises(RequestError, match="9 images in one conversation, more than data.max_images_per_prompt=8"):
        chat(policy, user(*[openai(1)] * 9))
    with pytest.raises(RequestError, match="maximum context length is 200"):
        chat(policy, user(*[openai(1)] * 8, {"type": "text", "text": "a " * 190}))
    with pytest.raises(RequestError, match="an answer has no images"):
        chat(policy, user(TEXT), {"role": "assistant", "content": [openai(1)]}, user(TEXT))


def test_a_model_of_text_reads_no_images(policy):
    text = ServedModel("tiny", policy.tokenizer, 200, 64, policy.vocab_size)
    with pytest.raises(RequestError, match="'image_url' is not supported; this model takes text only"):
        chat(text, user(openai(1), TEXT))
    with pytest.raises(DataError, match="this model reads text only"):
        content_text([picture(1)], None)
    assert with_images([1, 2], [], None) == ([1, 2], None)


def test_pictures_of_tools_and_environments_arrive_as_they_are(policy):
    content = ["What", picture(1)]
    expected = content_text(content, policy.processor)
    assert content_text(sendable(content), policy.processor) == expected
    tools = {
        "look": lambda: content,
        "count": lambda: [1, 2],
        "fetch": lambda: [openai(1) | {"image_url": "http://a/b"}],
    }
    answers = {name: asyncio.run(call_tool(tools, name, {})) for name in tools}
    assert content_text(answers["look"], policy.processor) == expected
    assert answers["count"] == "[1, 2]" and "nothing is fetched" in answers["fetch"]
