"""Write answers in OpenAI's format: whole bodies, stream chunks, errors. Extensions use names that OpenAI does not.

Every answer has `weights_version`, the version of the oldest weights that sampled one of its tokens. With
`return_token_ids`, a choice has `token_ids` and `token_versions`, and its first chunk `prompt_token_ids`. Called by
`server`.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.openai.parameters import RequestError
from hybridrl.serving.openai.requests import CompletionRequest
from hybridrl.workers.rollout.requests import Request, TokenOutput

UNFINISHED_CHARACTER = "\ufffd"  # a tokenizer's output for a character of which some bytes are missing
LOWEST_LOG_PROB = -9999.0
FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "stop"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@dataclass
class Choice:
    """One response in progress.

    Attributes:
        text: The part that may be shown so far.
        stop_text: The stop text that ended it; None: none did.
    """

    index: int
    request: Request
    completion: CompletionRequest
    tokenizer: Any
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    stop_text: str | None = None
    _num_reported: int = 0  # tokens whose details were sent

    def add(self, chunk: TokenOutput, *, is_last: bool) -> dict[str, Any]:
        """Append a chunk, and return what it adds as a choice of a stream."""
        self.token_ids += chunk.token_ids
        self.log_probs += [max(LOWEST_LOG_PROB, log_prob) for log_prob in chunk.log_probs]  # JSON has no infinity
        self.versions += chunk.token_versions
        if is_last:
            self.finish_reason = FINISH_REASONS[chunk.finish_reason]
        before, text = self.text, self._visible_text(is_last=is_last)
        added = self._show(text, is_last=is_last)[len(before) :]
        start, self._num_reported = self._num_reported, len(self.token_ids)
        return self._details(start) | self._content(added, delta=True)

    def body(self) -> dict[str, Any]:
        """Return the response as a choice of a whole answer."""
        return self._details(0) | self._content(self.text, delta=False)

    @property
    def message(self) -> dict[str, Any]:
        """Return the whole answer as a message."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        content = self.text if self.text or not calls else None
        return {"role": "assistant", "content": content, "refusal": None} | calls

    def _show(self, text: str, *, is_last: bool) -> str:
        """Set the text that may be shown, and at the end the calls; return that text."""
        tool_format, before = self.completion.tool_format, self.text
        if tool_format is None:
            self.text = text
        elif not is_last:
            visible = self._without_special(tool_format.visible(text))
            self.text = visible if visible.startswith(before) else before
        else:
            content, calls = tool_format.parse(text)
            self.text = self._without_special(content)
            kept = calls[:1] if self.completion.has_one_call else calls
            self.tool_calls = [
                {
                    "id": self._call_id(number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(kept)
            ]
            self.finish_reason = "tool_calls" if kept else self.finish_reason
        return self.text if self.text.startswith(before) else before

    def _call_id(self, number: int) -> str:
        """Return nine letters and digits, as Mistral's templates demand, the same ones when a run is repeated."""
        request = self.request
        what = request.prompt_ids, self.token_ids, request.seed, request.sample, number
        return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()[:9]

    def _decode(self) -> str:
        """Return the text without special tokens; where calls may have some, only without the end of the turn."""
        if self.completion.tool_format is None:
            return self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        has_end = bool(self.token_ids) and self.token_ids[-1] in self.tokenizer.all_special_ids
        return self.tokenizer.decode(self.token_ids[: len(self.token_ids) - has_end], skip_special_tokens=False)

    def _without_special(self, text: str) -> str:
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def _visible_text(self, *, is_last: bool) -> str:
        """Return the text up to the stop text.

        Before the end, hold back what may become part of a stop text.
        """
        text = self._decode()
        if is_last:
            found = [
                (at, stop)
                for stop in self.completion.stop
                if (at := text.find(stop, max(0, len(text) - 2 * len(stop)))) >= 0
            ]
            if not found or self.finish_reason != "stop":
                return text
            place, self.stop_text = min(found)
            return text[:place]
        held_back = max((len(stop) for stop in self.completion.stop), default=1) - 1
        safe = text[: len(text) - held_back].rstrip(UNFINISHED_CHARACTER)
        return safe if self.completion.tool_format is not None or safe.startswith(self.text) else self.text

    def _content(self, text: str, *, delta: bool) -> dict[str, Any]:
        if not self.completion.is_chat:
            return {"text": text}
        if not delta:
            return {"message": self.message}
        calls = [{"index": number, **call} for number, call in enumerate(self.tool_calls)]
        return {"delta": {"content": text} | ({"tool_calls": calls} if calls else {})}

    def _details(self, start: int) -> dict[str, Any]:
        details: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason, "logprobs": None}
        if self.completion.logprobs:
            details["logprobs"] = (
                self._chat_logprobs(start) if self.completion.is_chat else self._completion_logprobs(start)
            )
        if self.completion.return_token_ids:
            details |= {"token_ids": self.token_ids[start:], "token_versions": self.versions[start:]}
            if start == 0:
                details["prompt_token_ids"] = list(self.request.prompt_ids)
        return details

    def _token_texts(self, start: int) -> list[str]:
        return [self.tokenizer.decode([token]) for token in self.token_ids[start:]]

    def _chat_logprobs(self, start: int) -> dict[str, Any]:
        rows = zip(self._token_texts(start), self.log_probs[start:], strict=True)
        content = [{"token": text, "logprob": lp, "bytes": _bytes(text), "top_logprobs": []} for text, lp in rows]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, start: int) -> dict[str, Any]:
        texts = self._token_texts(start)
        before = len(self.tokenizer.decode(self.token_ids[:start]))
        offsets = [before + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {"tokens": texts, "token_logprobs": self.log_probs[start:], "top_logprobs": None, "text_offset": offsets}


def _bytes(text: str) -> list[int] | None:
    """Return a token's bytes; None for a token that is only a part of a character."""
    return None if UNFINISHED_CHARACTER in text else list(text.encode())


def completion_body(
    completion: CompletionRequest, choices: list[Choice], *, name: str, model: str, created: int
) -> dict[str, Any]:
    """Return the whole answer."""
    kind = "chat.completion" if completion.is_chat else "text_completion"
    head = _head(name, model, created, kind, versions=[v for choice in choices for v in choice.versions])
    return head | {"choices": [choice.body() for choice in choices], "usage": usage(completion, choices)}


def stream_chunk(
    completion: CompletionRequest, choice: Choice, content: dict, *, name: str, model: str, created: int
) -> dict[str, Any]:
    """Return one chunk of a streamed answer. content: what `Choice.add` returned."""
    kind = "chat.completion.chunk" if completion.is_chat else "text_completion"
    return _head(name, model, created, kind, versions=choice.versions) | {"choices": [content]}


def final_chunk(
    completion: CompletionRequest, choices: list[Choice], *, name: str, model: str, created: int
) -> dict[str, Any]:
    """Return the last chunk of a streamed answer, with the token counts."""
    kind = "chat.completion.chunk" if completion.is_chat else "text_completion"
    head = _head(name, model, created, kind, versions=[v for choice in choices for v in choice.versions])
    return head | {"choices": [], "usage": usage(completion, choices)}


def usage(completion: CompletionRequest, choices: list[Choice]) -> dict[str, int]:
    """Return the token counts. A prompt with n answers counts once."""
    prompt = sum(len(request.prompt_ids) for request in completion.requests[:: completion.n])
    generated = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _head(name: str, model: str, created: int, kind: str, *, versions: list[int]) -> dict[str, Any]:
    version = min(versions, default=None)
    fingerprint = None if version is None else f"weights-{version}"
    return {
        "id": name,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": fingerprint,
        "weights_version": version,
    }


def error_body(error: RequestError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
