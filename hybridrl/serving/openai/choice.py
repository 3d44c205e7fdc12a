"""`Choice`: one response in progress, as OpenAI's format shows it, in whole and in parts.

Log-probs, token ids and weight versions of its tokens are in the format, too; `token_ids`, `token_versions` and
`prompt_token_ids` are names that OpenAI does not have. The APIs make their own formats of it.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.openai.requests import CompletionRequest
from hybridrl.workers.rollout.requests import TokenOutput

UNFINISHED_CHARACTER = "\ufffd"  # a tokenizer's output for a character of which some bytes are missing
LOWEST_LOG_PROB = -9999.0
FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "stop"}


@dataclass
class Choice:
    """Response number `index` of a request.

    Attributes:
        text: The part that may be shown so far.
        stop_text: The stop text that ended it; None: none did.
    """

    index: int
    completion: CompletionRequest
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Any = None
    finish_reason: str | None = None
    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    stop_text: str | None = None
    _num_reported: int = 0  # tokens whose details were sent

    def __post_init__(self) -> None:
        self.request, self.tokenizer = self.completion.requests[self.index], self.completion.policy.tokenizer

    def add(self, chunk: TokenOutput) -> dict[str, Any]:
        """Append a chunk, and return what it adds as a choice of a stream. The session records a complete answer."""
        is_last = chunk.finish_reason != "pause"
        self.token_ids += chunk.token_ids
        self.log_probs += [max(LOWEST_LOG_PROB, log_prob) for log_prob in chunk.log_probs]  # JSON has no infinity
        self.versions += chunk.token_versions
        self.routes = self.routes if chunk.routes is None else chunk.routes
        if is_last:
            self.finish_reason = FINISH_REASONS[chunk.finish_reason]
        before, text = self.text, self._visible_text(is_last=is_last)
        added = self._show(text, is_last=is_last)[len(before) :]
        if is_last:
            self._record()
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

    def _record(self) -> None:
        if self.completion.session is not None and self.completion.plan is not None:
            self.completion.session.record(
                self.completion.plan,
                token_ids=self.token_ids,
                log_probs=self.log_probs,
                versions=self.versions,
                routes=self.routes,
                reply=self.message,
                stop_text=self.stop_text,
                answer_id=self.completion.name,
            )

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
