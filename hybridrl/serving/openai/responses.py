"""Writing answers of OpenAI's form: whole ones, pieces of streams, errors. Extensions have names that OpenAI does not
use.

`weights_version` stands beside every answer: of the oldest weights that made a token of it. With `return_token_ids` a
choice has `token_ids` and `token_versions`, and the first piece of a stream `prompt_token_ids`.
"""

from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.openai.requests import Question, Refusal
from hybridrl.workers.rollout.requests import Request, TokenOutput

UNFINISHED_CHARACTER = "\ufffd"  # what a tokenizer writes for a character whose bytes are not all there
FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "stop"}
ERROR_TYPES = {
    401: "authentication_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@dataclass
class Choice:
    """One response in the making. text: what may be shown of it so far."""

    index: int
    request: Request
    question: Question
    tokenizer: Any
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    _shown: int = 0  # tokens whose details were shown

    def add(self, piece: TokenOutput, *, is_last: bool) -> dict[str, Any]:
        """Take a piece; return what it adds, in the form of a choice of a stream."""
        self.token_ids += piece.token_ids
        self.log_probs += piece.log_probs
        self.versions += piece.token_versions
        if is_last:
            self.finish_reason = FINISH_REASONS[piece.finish_reason]
        before, self.text = self.text, self._readable(is_last=is_last)
        start, self._shown = self._shown, len(self.token_ids)
        return self._details(start) | self._said(self.text[len(before) :], delta=True)

    def whole(self) -> dict[str, Any]:
        """Return the response as a choice of an answer."""
        return self._details(0) | self._said(self.text, delta=False)

    def _readable(self, *, is_last: bool) -> str:
        """The text without the stop text that ended it, and, before the end, without what may turn out to be part of
        one.
        """
        text = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        if is_last:
            found = [
                at for stop in self.question.stop if (at := text.find(stop, max(0, len(text) - 2 * len(stop)))) >= 0
            ]
            return text[: min(found)] if found and self.finish_reason == "stop" else text
        kept = max((len(stop) for stop in self.question.stop), default=1) - 1
        safe = text[: len(text) - kept].rstrip(UNFINISHED_CHARACTER)
        return safe if safe.startswith(self.text) else self.text

    def _said(self, text: str, *, delta: bool) -> dict[str, Any]:
        if not self.question.is_chat:
            return {"text": text}
        return (
            {"delta": {"content": text}}
            if delta
            else {"message": {"role": "assistant", "content": text, "refusal": None}}
        )

    def _details(self, start: int) -> dict[str, Any]:
        details: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason, "logprobs": None}
        if self.question.logprobs:
            details["logprobs"] = (
                self._chat_logprobs(start) if self.question.is_chat else self._completion_logprobs(start)
            )
        if self.question.return_token_ids:
            details |= {"token_ids": self.token_ids[start:], "token_versions": self.versions[start:]}
            if start == 0:
                details["prompt_token_ids"] = list(self.request.prompt_ids)
        return details

    def _words(self, start: int) -> list[str]:
        return [self.tokenizer.decode([token]) for token in self.token_ids[start:]]

    def _chat_logprobs(self, start: int) -> dict[str, Any]:
        rows = zip(self._words(start), self.log_probs[start:], strict=True)
        content = [{"token": word, "logprob": lp, "bytes": _bytes(word), "top_logprobs": []} for word, lp in rows]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, start: int) -> dict[str, Any]:
        words = self._words(start)
        before = len(self.tokenizer.decode(self.token_ids[:start]))
        offsets = [before + sum(map(len, words[:i])) for i in range(len(words))]
        return {"tokens": words, "token_logprobs": self.log_probs[start:], "top_logprobs": None, "text_offset": offsets}


def _bytes(word: str) -> list[int] | None:
    """A word's bytes; None for a token that is only a part of a character."""
    return None if UNFINISHED_CHARACTER in word else list(word.encode())


def answer(question: Question, choices: list[Choice], *, name: str, model: str, created: int) -> dict[str, Any]:
    """Return the whole answer."""
    kind = "chat.completion" if question.is_chat else "text_completion"
    head = _head(name, model, created, kind, versions=[v for choice in choices for v in choice.versions])
    return head | {"choices": [choice.whole() for choice in choices], "usage": usage(question, choices)}


def piece_of_stream(
    question: Question, choice: Choice, said: dict, *, name: str, model: str, created: int
) -> dict[str, Any]:
    """Return one piece of a streamed answer. said: what `Choice.add` returned."""
    kind = "chat.completion.chunk" if question.is_chat else "text_completion"
    return _head(name, model, created, kind, versions=choice.versions) | {"choices": [said]}


def end_of_stream(question: Question, choices: list[Choice], *, name: str, model: str, created: int) -> dict[str, Any]:
    """Return the last piece, which says how much it was."""
    kind = "chat.completion.chunk" if question.is_chat else "text_completion"
    head = _head(name, model, created, kind, versions=[v for choice in choices for v in choice.versions])
    return head | {"choices": [], "usage": usage(question, choices)}


def usage(question: Question, choices: list[Choice]) -> dict[str, int]:
    prompt = sum(len(request.prompt_ids) for request in question.requests[:: question.n])
    made = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


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


def error_body(error: Refusal) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
