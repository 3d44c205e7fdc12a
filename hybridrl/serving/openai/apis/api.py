"""Base classes of an API that the endpoint serves: the API, and the writer of its streams."""

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from hybridrl.serving.openai.choice import Choice
from hybridrl.serving.openai.parameters import ParameterNames, RequestError, ServedModel, check_names, without_demands
from hybridrl.serving.openai.requests import CompletionRequest, parse_request, read_json
from hybridrl.serving.sessions.session import Session


class Event(NamedTuple):
    """A server-sent event. name: None where the API names none."""

    data: Mapping[str, Any] | str
    name: str | None = None


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class StreamWriter(ABC):
    """Turns the chunks of one answer into events. Each method returns events in their order."""

    def __init__(self, choices: list[Choice]):
        self.choices, self.choice, self.completion = choices, choices[0], choices[0].completion

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Return what comes before the first chunk."""

    @abstractmethod
    def add(self, choice: Choice, content: Mapping[str, Any]) -> Iterator[Event]:
        """Return what a chunk adds. content: what `Choice.add` returned."""

    @abstractmethod
    def end(self) -> Iterator[Event]:
        """Return what comes after the last chunk."""

    @abstractmethod
    def fail(self, error: RequestError) -> Iterator[Event]:
        """Return what comes after an error, as the end of the stream."""


class Api(ABC):
    """One API.

    Attributes:
        names: Its parameters.
        id_prefix: Of the ids of its answers.
        is_chat: Whether its requests have messages and not prompts.
        writer: Writes streamed answers.
        renamed: Parameter of a chat request -> its name in this API, for errors.
    """

    names: ParameterNames
    id_prefix: str
    is_chat = True
    writer: type[StreamWriter]
    renamed: Mapping[str, str] = {}

    @abstractmethod
    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a chat request. Called in any thread.

        Raises:
            RequestError: A part of the request has no meaning there.
        """

    @abstractmethod
    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the whole answer to a request."""

    @staticmethod
    def error_body(error: RequestError) -> dict[str, Any]:
        """Return an error as the body of an answer; by default in OpenAI's format."""
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

    def answered(self, choice: Choice) -> None:  # noqa: B027 - most APIs keep nothing
        """Take notice of a complete answer."""

    def parse(self, raw: bytes, *, policy: ServedModel, session: Session | None) -> CompletionRequest:
        """Return a parsed request. Raises RequestError, in the words of this API, if it cannot be served."""
        body = self.read_body(raw, session)
        chat, name = self.to_chat(body), f"{self.id_prefix}{uuid.uuid4().hex}"
        with self.in_its_words():
            completion = parse_request(chat, is_chat=self.is_chat, policy=policy, name=name, session=session)
        return replace(completion, given=body)

    def read_body(self, raw: bytes, session: Session | None) -> dict[str, Any]:
        """Return the body of a request. Raises RequestError for parameters that this API does not have or support."""
        body = read_json(raw)
        if session is not None and session.episode is not None:
            body = without_demands(body, self.names)
        check_names(body, self.names)
        return body

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Let errors name parameters of a chat request as this API does."""
        try:
            yield
        except RequestError as error:
            error.param = self.renamed.get(error.param or "", error.param)
            for chat_name, name in self.renamed.items():
                error.message = re.sub(rf"\b{chat_name}\b", name, error.message)
            raise


def oldest_version(choices: list[Choice]) -> int | None:
    """Return the version of the oldest weights that sampled a token; None before the first one."""
    return min((version for choice in choices for version in choice.versions), default=None)
