"""`/v1/completions` and `/v1/chat/completions`: the formats that all other APIs are translated from and to."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hybridrl.serving.openai.apis.base import About, Event
from hybridrl.serving.openai.parameters import CHAT, COMPLETIONS, ParameterNames, RequestError
from hybridrl.serving.openai.requests import CompletionRequest
from hybridrl.serving.openai.responses import Choice, completion_body, error_body, final_chunk, stream_chunk


@dataclass(frozen=True)
class CompletionsApi:
    """OpenAI's API of completions. kind: "completions" or "chat"."""

    kind: str
    renamed: Mapping[str, str]

    @property
    def id_prefix(self) -> str:
        return "chatcmpl-" if self.kind == "chat" else "cmpl-"

    @property
    def names(self) -> ParameterNames:
        return CHAT if self.kind == "chat" else COMPLETIONS

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body as it is."""
        return body

    def answer(self, completion: CompletionRequest, choices: list[Choice], about: About) -> dict[str, Any]:
        return completion_body(completion, choices, **asdict(about))

    def writer(self, completion: CompletionRequest, choices: list[Choice], about: About) -> "CompletionsWriter":
        return CompletionsWriter(completion, choices, about)

    def answered(self, completion: CompletionRequest, choice: Choice) -> None:
        """Keep nothing."""

    def error_body(self, error: RequestError) -> dict[str, Any]:
        return error_body(error)


@dataclass
class CompletionsWriter:
    """Chunks without names, and `[DONE]` at the end."""

    completion: CompletionRequest
    choices: list[Choice]
    about: About

    def begin(self) -> Iterator[Event]:
        for choice in self.choices if self.completion.is_chat else ():
            delta = {"role": "assistant", "content": ""}
            first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._chunk(choice, first)

    def add(self, choice: Choice, content: Mapping[str, Any]) -> Iterator[Event]:
        yield self._chunk(choice, dict(content))

    def end(self) -> Iterator[Event]:
        if self.completion.include_usage:
            yield Event(final_chunk(self.completion, self.choices, **asdict(self.about)))
        yield Event("[DONE]")

    def fail(self, error: RequestError) -> Iterator[Event]:
        yield Event(error_body(error))
        yield Event("[DONE]")

    def _chunk(self, choice: Choice, content: dict[str, Any]) -> Event:
        return Event(stream_chunk(self.completion, choice, content, **asdict(self.about)))
