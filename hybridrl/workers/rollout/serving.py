"""Token-in/token-out requests that come and go: what one rollout process does for the router and its agent loops.

Its caller drives it: `Server.serve` takes new requests, works for a moment and returns what has ended meanwhile. Between two such
calls the process does whatever else it is told, a push of weights for instance, and a call that does not return says that the process
is stuck. The `hf` engine works on batches of what waits, in pieces (`PieceEngine`); vLLM batches continuously (`serving_vllm`).

A request's tokens depend on its seed, sample and place in the response, and not on who makes them, beside what, in how many pieces: so
a request may be given up and made again elsewhere, and its answer is the same.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from hybridrl.errors import DataError
from hybridrl.workers.rollout.base import VersionedRollout
from hybridrl.workers.rollout.history import Ends
from hybridrl.workers.rollout.sampler import SamplingParams, advance, sequence_keys

FinishReason = Literal["stop", "length", "abort", "pause"]

# Tokens that a piece adds to each of its requests. Fewer, and prompts are computed again more often; more, and new requests wait longer.
PIECE_TOKENS = 64


@dataclass(frozen=True)
class Request:
    """One response to be made, or its next part.

    prompt_ids: all tokens so far. sampling: with n = 1; `max_new_tokens` is this request's own. seed, sample: it is sample number
    `sample` of the prompt with this seed, as in a batch with `n` of them. num_done: how many of the last prompt_ids belong to the
    response already (what was sampled in earlier turns, and what tools said): random numbers go on from there.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    sample: int = 0
    num_done: int = 0

    def __post_init__(self) -> None:
        if self.sampling.n != 1:
            raise ValueError(f"request {self.request_id}: sampling n={self.sampling.n}; a request is one response, send {self.sampling.n}")
        if not 0 <= self.num_done < len(self.prompt_ids):
            raise DataError(f"request {self.request_id}: {len(self.prompt_ids)} tokens, {self.num_done} of them response, leave no prompt")

    @property
    def key(self) -> torch.Tensor:
        """The key (1,) int64 of its stream of random numbers, as `uniforms` wants it."""
        keys = sequence_keys(torch.tensor([self.seed], dtype=torch.int64), self.sample + 1)
        return advance(keys[self.sample :], self.num_done)


@dataclass(frozen=True)
class TokenOutput:
    """What was sampled for a request.

    finish_reason: "stop" ended by a token or text that ends responses (it is included), "length" at max_new_tokens, "abort" as told,
    with what there was, "pause" the same because of a push of weights. version: of the oldest weights that made a token of it, -1 if
    nothing was made. mixed: the version of each token, where not all are of the same weights.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version: int
    mixed: tuple[int, ...] = ()

    @property
    def token_versions(self) -> list[int]:
        """The version of the weights that made each token."""
        return list(self.mixed) or [self.version] * len(self.token_ids)


class ServingEngine(Protocol):
    """Requests in, tokens out, in steps that take a moment."""

    def add(self, request: Request) -> None: ...

    def step(self) -> list[TokenOutput]:
        """Work on the open requests for a moment; return those that ended."""

    def abort(self, request_id: str) -> TokenOutput | None:
        """End an open request; None if there is none of this name."""

    def num_open(self) -> int: ...

    def is_open(self, request_id: str) -> bool: ...


class Server:
    """The serving side of a rollout that also generates whole batches, one or the other at a time."""

    def __init__(self, rollout: VersionedRollout, engine: ServingEngine):
        self.rollout, self.engine = rollout, engine

    def serve(self, requests: Sequence[Request], aborted: Sequence[str], *, slice_s: float) -> list[TokenOutput]:
        """Take up requests, end those in `aborted`, work for about `slice_s` seconds or until one has ended; return what has ended."""
        for request in requests:
            self._require_room(request)
        for request in requests:
            if self.engine.is_open(request.request_id):
                raise ValueError(f"request {request.request_id} is open already; ids must differ")
            self.engine.add(request)
        done = [output for name in aborted if (output := self.engine.abort(name)) is not None]
        until = time.monotonic() + slice_s
        while self.engine.num_open():
            self.rollout.current_version()
            done += self.engine.step()
            if time.monotonic() >= until:
                break
        return done

    def _require_room(self, request: Request) -> None:
        setup, new = self.rollout.setup, request.sampling.max_new_tokens
        if new > setup.max_response_length or len(request.prompt_ids) + new > setup.max_length:
            raise DataError(
                f"request {request.request_id}: {len(request.prompt_ids)} tokens and {new} to come; the rollout was built for "
                f"{setup.max_length} in all, at most {setup.max_response_length} of them new (data.max_prompt_length, "
                "data.max_response_length)"
            )


def make_server(rollout: VersionedRollout) -> Server:
    """Return the server for this rollout: by vLLM's continuous batching if it is one of vLLM's, else in pieces."""
    if rollout.engine_name == "vllm":
        from hybridrl.workers.rollout.serving_vllm import VLLMEngine

        return Server(rollout, VLLMEngine(rollout))
    return Server(rollout, PieceEngine(rollout))


@dataclass
class _Open:
    request: Request
    version: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.tokens)

    @property
    def num_done(self) -> int:
        return self.request.num_done + len(self.tokens)

    def output(self, reason: FinishReason) -> TokenOutput:
        return TokenOutput(self.request.request_id, self.tokens, self.log_probs, reason, self.version)


class PieceEngine:
    """Serves with any rollout's batched generation: a step is one piece of `PIECE_TOKENS` tokens for what can be batched together."""

    def __init__(self, rollout: VersionedRollout):
        self.rollout = rollout
        self._open: dict[str, _Open] = {}

    def add(self, request: Request) -> None:
        self._open[request.request_id] = _Open(request, self.rollout.current_version())

    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def abort(self, request_id: str) -> TokenOutput | None:
        entry = self._open.pop(request_id, None)
        return None if entry is None else entry.output("abort")

    def step(self) -> list[TokenOutput]:
        batch = self._next_batch()
        width = min(PIECE_TOKENS, max(entry.left for entry in batch))
        sampling, done = replace(batch[0].request.sampling, max_new_tokens=width), batch[0].num_done
        keys = torch.cat([advance(entry.request.key, len(entry.tokens)) for entry in batch])
        ends = self.rollout.ends(sampling)
        prompts = [[*entry.request.prompt_ids, *entry.tokens] for entry in batch]
        made = self.rollout.generate_tokens(prompts, keys, sampling, num_done=done if looks_back(sampling, ends) else 0)
        rows = zip(batch, made.tokens.tolist(), made.log_probs.tolist(), made.mask.sum(-1).tolist(), strict=True)
        return [output for entry, tokens, log_probs, length in rows if (output := self._take(entry, tokens[:length], log_probs, ends))]

    def _next_batch(self) -> list[_Open]:
        """The oldest request and those that can be computed with it."""
        kinds = {name: self._kind(entry) for name, entry in self._open.items()}
        oldest = next(iter(kinds.values()))
        return [self._open[name] for name, kind in kinds.items() if kind == oldest][: self.rollout.setup.config.max_num_seqs]

    def _kind(self, entry: _Open) -> tuple[SamplingParams, int]:
        sampling = replace(entry.request.sampling, max_new_tokens=1, seed=0)
        return sampling, entry.num_done if looks_back(sampling, self.rollout.ends(sampling)) else 0

    def _take(self, entry: _Open, tokens: list[int], log_probs: list[float], ends: Ends) -> TokenOutput | None:
        """Add a piece's tokens to a request; return its output if that was the end of it."""
        tokens = tokens[: entry.left]
        entry.tokens += tokens
        entry.log_probs += log_probs[: len(tokens)]
        if not _has_ended(entry, ends) and entry.left:
            return None
        del self._open[entry.request.request_id]
        return entry.output("stop" if _has_ended(entry, ends) else "length")


def looks_back(sampling: SamplingParams, ends: Ends) -> bool:
    """Whether the next token depends on how many the response has."""
    return sampling.penalises or sampling.min_tokens > 0 or ends.strings is not None


def _has_ended(entry: _Open, ends: Ends) -> bool:
    if entry.tokens[-1] in ends.ids:
        return True
    if ends.strings is None or entry.num_done <= entry.request.sampling.min_tokens:
        return False
    # What an earlier turn or a tool wrote is looked at, too, as `History` does.
    tail = [*entry.request.prompt_ids[len(entry.request.prompt_ids) - entry.request.num_done :], *entry.tokens][-ends.strings.window :]
    return ends.strings.completed_by_last(tail)
