"""Requests served by any rollout that generates whole batches: in pieces, see `PieceEngine`."""

from dataclasses import dataclass, field, replace

import torch

from hybridrl.workers.rollout.base import VersionedRollout
from hybridrl.workers.rollout.requests import FinishReason, Request, TokenOutput, looks_back
from hybridrl.workers.rollout.sampling.logits import Ends
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, advance

# Tokens that a piece adds to each of its requests. Fewer, and prompts are computed again more often; more, and new
# requests wait longer.
PIECE_TOKENS = 64


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
    """Serves with any rollout's batched generation: a step is one piece of `PIECE_TOKENS` tokens for what can be
    batched together.
    """

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
        return [
            output
            for entry, tokens, log_probs, length in rows
            if (output := self._take(entry, tokens[:length], log_probs, ends))
        ]

    def _next_batch(self) -> list[_Open]:
        """The oldest request and those that can be computed with it."""
        kinds = {name: self._kind(entry) for name, entry in self._open.items()}
        oldest = next(iter(kinds.values()))
        return [self._open[name] for name, kind in kinds.items() if kind == oldest][
            : self.rollout.setup.config.max_num_seqs
        ]

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


def _has_ended(entry: _Open, ends: Ends) -> bool:
    if entry.tokens[-1] in ends.ids:
        return True
    if ends.strings is None or entry.num_done <= entry.request.sampling.min_tokens:
        return False
    # What an earlier turn or a tool wrote is looked at, too, as `History` does.
    tail = [*entry.request.prompt_ids[len(entry.request.prompt_ids) - entry.request.num_done :], *entry.tokens][
        -ends.strings.window :
    ]
    return ends.strings.completed_by_last(tail)
