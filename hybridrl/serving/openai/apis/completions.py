"""`/v1/completions` and `/v1/chat/completions`: the formats that all other APIs are translated from and to.

Extensions use names that OpenAI does not. Every answer has `weights_version`, the version of the oldest weights that
sampled one of its tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.serving.openai.apis.api import Api, Event, StreamWriter, oldest_version
from hybridrl.serving.openai.choice import Choice
from hybridrl.serving.openai.parameters import CHAT, COMPLETIONS, RequestError


class CompletionsWriter(StreamWriter):
    """Chunks without names, and `[DONE]` at the end."""

    def __init__(self, choices: list[Choice]):
        super().__init__(choices)
        self.kind = "chat.completion.chunk" if self.completion.is_chat else "text_completion"

    def begin(self) -> Iterator[Event]:
        for choice in self.choices if self.completion.is_chat else ():
            delta = {"role": "assistant", "content": ""}
            first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield from self.add(choice, first)

    def add(self, choice: Choice, content: Mapping[str, Any]) -> Iterator[Event]:
        yield Event(_head([choice], self.kind) | {"choices": [dict(content)]})

    def end(self) -> Iterator[Event]:
        if self.completion.include_usage:
            yield Event(_head(self.choices, self.kind) | {"choices": [], "usage": _usage(self.choices)})
        yield Event("[DONE]")

    def fail(self, error: RequestError) -> Iterator[Event]:
        yield Event(Api.error_body(error))
        yield Event("[DONE]")


class CompletionsApi(Api):
    """OpenAI's API of completions."""

    names, id_prefix, is_chat, writer = COMPLETIONS, "cmpl-", False, CompletionsWriter

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body as it is."""
        return body

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return _head(choices, kind) | {"choices": [choice.body() for choice in choices], "usage": _usage(choices)}


class ChatApi(CompletionsApi):
    """OpenAI's API of chats."""

    names, id_prefix, is_chat = CHAT, "chatcmpl-", True


def _head(choices: list[Choice], kind: str) -> dict[str, Any]:
    """Return what an answer or a chunk says of itself. choices: those whose weights it names."""
    completion, version = choices[0].completion, oldest_version(choices)
    return {
        "id": completion.name,
        "object": kind,
        "created": completion.created,
        "model": completion.policy.name,
        "system_fingerprint": None if version is None else f"weights-{version}",
        "weights_version": version,
    }


def _usage(choices: list[Choice]) -> dict[str, int]:
    """Return the token counts. A prompt with n answers counts once."""
    completion = choices[0].completion
    prompt = sum(len(request.prompt_ids) for request in completion.requests[:: completion.n])
    generated = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
