"""Policies with scripted answers: to requests of the endpoint, and to the turns of an agent loop."""

from dataclasses import dataclass, field

from hybridrl.workers.rollout.requests import Request, TokenOutput

PROMPT, RESPONSE = 200, 300  # tokens of a row


@dataclass
class Script:
    """A policy with scripted answers, each ended by the end token, or by the token that completes a stop text."""

    tokenizer: object
    answers: list[str]
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        whole = self._drawn([*self.tokenizer.encode(self.answers[0]), self.tokenizer.eos_token_id], request)
        done = request.num_done
        ids = whole[done : done + request.sampling.max_new_tokens]
        is_last = done + len(ids) == len(whole)
        self.requests.append(request)
        self.answers = self.answers[is_last:]
        return TokenOutput(request.request_id, ids, [-0.25] * len(ids), "stop" if is_last else "length", 7)

    def _drawn(self, ids: list[int], request: Request) -> list[int]:
        """Return the tokens up to a stop text of the request."""
        for num in range(1, len(ids)):
            if any(stop in self.tokenizer.decode(ids[:num]) for stop in request.sampling.stop):
                return ids[:num]
        return ids


@dataclass
class ScriptedTurns:
    """A policy with scripted turns: texts, each ended by the end token. Its n-th turn has the weight version n."""

    tokenizer: object
    turns: list[str]
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        self.requests.append(request)
        tokens = [*self.tokenizer.encode(self.turns[len(self.requests) - 1]), self.tokenizer.eos_token_id]
        kept = tokens[: request.sampling.max_new_tokens]
        assert conversation is not None and conversation.startswith("r")
        return TokenOutput(
            request.request_id, kept, [-0.5] * len(kept), "stop" if kept == tokens else "length", len(self.requests)
        )
