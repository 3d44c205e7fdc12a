"""What `server` needs of an API: `Api`, and the writer of its streams."""

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from hybridrl.serving.openai.parameters import ParameterNames, Policy, RequestError, check_names, without_demands
from hybridrl.serving.openai.requests import CompletionRequest, parse_request, read_json
from hybridrl.serving.openai.responses import Choice
from hybridrl.serving.sessions.session import Session


class Event(NamedTuple):
    """A server-sent event. name: None where the API names none."""

    data: Mapping[str, Any] | str
    name: str | None = None


@dataclass(frozen=True)
class About:
    """What an answer says of itself. created: seconds since 1970."""

    name: str
    model: str
    created: int


class StreamWriter(Protocol):
    """Turns the chunks of one answer into events. Each method returns events in their order."""

    def begin(self) -> Iterator[Event]:
        """Return what comes before the first chunk."""
        ...

    def add(self, choice: Choice, content: Mapping[str, Any]) -> Iterator[Event]:
        """Return what a chunk adds. content: what `Choice.add` returned."""
        ...

    def end(self) -> Iterator[Event]:
        """Return what comes after the last chunk."""
        ...

    def fail(self, error: RequestError) -> Iterator[Event]:
        """Return what comes after an error, as the end of the stream."""
        ...


class Api(Protocol):
    """One API.

    Attributes:
        kind: How its requests are served: "completions" or "chat".
        names: Its parameters.
        renamed: Parameter of a chat request -> its name in this API, for errors.
    """

    @property
    def kind(self) -> str: ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def names(self) -> ParameterNames: ...

    @property
    def renamed(self) -> Mapping[str, str]: ...

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a chat request. Called in any thread.

        Raises:
            RequestError: A part of the request has no meaning there.
        """
        ...

    def answer(self, completion: CompletionRequest, choices: list[Choice], about: About) -> dict[str, Any]:
        """Return the whole answer."""
        ...

    def writer(self, completion: CompletionRequest, choices: list[Choice], about: About) -> StreamWriter:
        """Return the writer of a streamed answer."""
        ...

    def answered(self, completion: CompletionRequest, choice: Choice) -> None:
        """Take notice of a complete answer."""
        ...

    def error_body(self, error: RequestError) -> dict[str, Any]:
        """Return an error as the body of an answer."""
        ...


def new_id(api: Api) -> str:
    """Return an id for an answer."""
    return f"{api.id_prefix}{uuid.uuid4().hex}"


def parse(api: Api, raw: bytes, *, policy: Policy, name: str, session: Session | None) -> CompletionRequest:
    """Return the parsed request of an API. Raises RequestError, in the words of this API, if it cannot be served."""
    body = read_body(api, raw, session)
    chat = api.to_chat(body)
    with in_its_words(api):
        completion = parse_request(chat, kind=api.kind, policy=policy, name=name, session=session)
    return replace(completion, given=body)


def read_body(api: Api, raw: bytes, session: Session | None) -> dict[str, Any]:
    """Return the body of a request. Raises RequestError for parameters that this API does not have or support."""
    body = read_json(raw)
    if session is not None and session.episode is not None:
        body = without_demands(body, api.names)
    check_names(body, api.names)
    return body


@contextmanager
def in_its_words(api: Api) -> Iterator[None]:
    """Let errors name parameters of a chat request as this API does."""
    try:
        yield
    except RequestError as error:
        error.param = api.renamed.get(error.param or "", error.param)
        for chat_name, name in api.renamed.items():
            error.message = re.sub(rf"\b{chat_name}\b", name, error.message)
        raise


def joined_text(parts: Any, kinds: tuple[str, ...], *, param: str) -> str:
    """Return a content as one text. Raises RequestError if it is no text, and no parts of these kinds.

    Args:
        parts: A text, or a list of parts.
        kinds: Types of parts that have a text.
        param: Of the request, for the error.
    """
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise RequestError(f"{param}: content must be a text, or a list of parts with a type", param=param)
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{param}: a part of the type {kind!r} is not supported; this model takes text only "
                f"({', '.join(kinds)})",
                param=param,
            )
    return "".join(part["text"] for part in parts)


def oldest_version(choices: list[Choice]) -> int | None:
    """Return the version of the oldest weights that sampled a token; None before the first one."""
    return min((version for choice in choices for version in choice.versions), default=None)
