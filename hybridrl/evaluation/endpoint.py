"""Responses of a model behind an OpenAI-compatible endpoint: `hybridrl eval` and `hybridrl chat` with a URL.

Requests that fail for a passing reason are sent again after growing pauses. A response that cannot be had is data: it
has a reason and no text. What would fail for every request (a wrong key, no such path) ends the work at once.
"""

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from hybridrl.errors import ConfigError, reason_of

CONNECT_TIMEOUT_S = 10.0
RESPONSE_TIMEOUT_S = 600.0  # of one try, for a whole response
MAX_ANSWER_BYTES = 64 << 20
TRIES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between two tries; doubled after each
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # statuses of HTTP that may be gone at the next try
HOPELESS = {401, 403, 404, 405}  # of the key or the path, equal for all requests
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EndpointModel:
    """A model behind an endpoint.

    Attributes:
        url: As clients of OpenAI take it: `http://host:port/v1`.
        name: The model's, as the endpoint calls it.
        key: Sent as `Authorization: Bearer KEY`.
    """

    url: str
    name: str = ""
    key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(frozen=True)
class EndpointResponse:
    """A response, or the reason why there is none.

    Attributes:
        text: "" if there is none.
        finish_reason: As the endpoint says it: "stop", "length", ...
        reason: Why there is none; "" if there is one.
    """

    text: str
    finish_reason: str = ""
    reason: str = ""


class EndpointRefusal(Exception):
    """An endpoint refuses one request; others may succeed."""


async def find_model(url: str, *, name: str | None, key_variable: str) -> EndpointModel:
    """Return the model of this name, or the only one, behind an endpoint.

    Args:
        url: Of the endpoint.
        name: The model's; None: the only one.
        key_variable: Environment variable with the key; if it is not set, none is sent.

    Raises:
        ConfigError: Nothing answers there, the key is refused, or there is no such model, or several.
    """
    model = EndpointModel(url.rstrip("/"), key=os.environ.get(key_variable) or None)
    async with client(model) as session:
        try:
            body = await _sent(session, "GET", f"{model.url}/models", None, key_variable=key_variable)
        except (EndpointRefusal, aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(
                f"{url}: no OpenAI-compatible endpoint answers there ({reason_of(error)}); start one with `hybridrl "
                "serve MODEL`, and give its address with /v1"
            ) from error
    names = [entry["id"] for entry in body.get("data", []) if isinstance(entry, dict) and "id" in entry]
    chosen = names[0] if name is None and len(names) == 1 else name
    if chosen is None or chosen not in names:
        which = f"has no model {name}" if name else "has several models, or none"
        raise ConfigError(f"{url}: {which}; it has {', '.join(names) or 'none'}. Choose one with --model-name")
    return EndpointModel(model.url, chosen, model.key)


@contextlib.asynccontextmanager
async def client(model: EndpointModel) -> AsyncIterator[aiohttp.ClientSession]:
    """Open the connections to an endpoint."""
    timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=model.headers, timeout=timeout, connector=connector) as session:
        yield session


async def respond_all(
    model: EndpointModel,
    requests: Sequence[tuple[Messages, Mapping[str, Any]]],
    *,
    max_open: int,
    on_done: Callable[[int], None] = lambda num: None,
) -> list[EndpointResponse]:
    """Return the response to each request, in order.

    Args:
        model: What responds.
        requests: Messages, and parameters of the endpoint such as `max_tokens` and `seed`.
        max_open: Most requests at a time.
        on_done: Called after each response with their number.

    Raises:
        ConfigError: The endpoint refuses the key or the path.
    """
    room, done = asyncio.Semaphore(max_open), 0

    async def one(messages: Messages, parameters: Mapping[str, Any]) -> EndpointResponse:
        nonlocal done
        async with room:
            body = {"model": model.name, "messages": [*messages], **parameters}
            try:
                choice = (await post_json(session, model, "/chat/completions", body))["choices"][0]
                response = EndpointResponse(choice["message"]["content"] or "", str(choice.get("finish_reason")))
            except (EndpointRefusal, aiohttp.ClientError, TimeoutError) as error:
                response = EndpointResponse("", reason=reason_of(error))
            except (KeyError, IndexError, TypeError) as error:
                response = EndpointResponse("", reason=f"the answer is no chat completion ({reason_of(error)})")
        done += 1
        on_done(done)
        return response

    try:
        async with client(model) as session, asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*request)) for request in requests]
    except BaseExceptionGroup as raised:
        if (refused := raised.subgroup(ConfigError)) is not None:
            raise refused.exceptions[0] from None
        raise
    return [task.result() for task in tasks]


async def post_json(
    session: aiohttp.ClientSession, model: EndpointModel, path: str, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON object that answers a POST; failures that may pass are tried `TRIES` times.

    Raises:
        EndpointRefusal: The endpoint refuses the request, or its last failure.
        ConfigError: It would refuse every request.
    """
    pause_s = FIRST_PAUSE_S
    for left in reversed(range(TRIES)):
        try:
            return await _sent(session, "POST", f"{model.url}{path}", body)
        except _Passing as failure:
            if not left:
                raise EndpointRefusal(f"{failure}, {TRIES} times") from failure
            wait_s = max(pause_s, failure.retry_after_s)
        except (aiohttp.ClientConnectionError, TimeoutError):
            if not left:
                raise
            wait_s = pause_s
        await asyncio.sleep(min(wait_s, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))  # not all at the same moment
        pause_s *= 2
    raise AssertionError("the last try has returned or raised")


async def stream_text(
    session: aiohttp.ClientSession, model: EndpointModel, body: Mapping[str, Any]
) -> AsyncIterator[str]:
    """Yield the parts of one chat response as the endpoint sends them.

    Raises:
        EndpointRefusal: The endpoint refuses the request, or answers with something else.
    """
    asked = {"model": model.name, "stream": True, **body}
    async with session.post(f"{model.url}/chat/completions", json=asked) as answer:
        if answer.status >= 300:
            raise EndpointRefusal(f"status {answer.status} ({_message(await _body(answer))})")
        async for line in _lines(answer):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            try:
                choices = json.loads(data)["choices"]
                yield (choices[0]["delta"].get("content") or "") if choices else ""
            except (ValueError, KeyError, TypeError) as error:
                raise EndpointRefusal(f"a part of the stream is no chat completion: {_message(data)}") from error


class _Passing(EndpointRefusal):
    def __init__(self, text: str, retry_after_s: float):
        super().__init__(text)
        self.retry_after_s = retry_after_s


async def _sent(
    session: aiohttp.ClientSession, method: str, url: str, body: Any, *, key_variable: str = ""
) -> dict[str, Any]:
    """Return the JSON object that answers one request."""
    async with session.request(method, url, json=body) as answer:
        raw = await _body(answer)
        if answer.status in HOPELESS:
            hint = f"; the key is read from {key_variable}" if key_variable and answer.status in (401, 403) else ""
            raise ConfigError(f"{url}: refused with status {answer.status} ({_message(raw)}){hint}")
        if answer.status in PASSING:
            after = answer.headers.get("Retry-After", "")
            seconds = float(after) if after.isdecimal() else 0.0
            raise _Passing(f"status {answer.status} ({_message(raw)})", seconds)
        if answer.status >= 300:
            raise EndpointRefusal(f"status {answer.status} ({_message(raw)})")
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise EndpointRefusal("the answer is not JSON") from error
        if not isinstance(found, dict):
            raise EndpointRefusal("the answer is not a JSON object")
        return found


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises EndpointRefusal for one that is too long, also if it is compressed."""
    parts, size = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise EndpointRefusal(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MB")
    return b"".join(parts)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. Raises EndpointRefusal for one that is too long."""
    try:
        async for line in answer.content:
            yield line
    except (ValueError, aiohttp.http_exceptions.LineTooLong) as error:
        raise EndpointRefusal("the stream has a line that is too long") from error


def _message(raw: bytes) -> str:
    """Return what a body says about an error."""
    try:
        return str(json.loads(raw)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return " ".join(raw.decode(errors="replace").split())[:200] or "no reason given"
