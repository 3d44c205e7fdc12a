"""Serve requests with any rollout that generates whole batches: each step is one chunk of one batch.

`HFRollout.request_engine` returns it, in the rollout's worker process. It is not continuous batching: a request waits
until the current chunk is done, and every chunk computes its prompts again.
"""

from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import torch

from hybridrl.data_plane.futures import stored
from hybridrl.workers.rollout.base import Rollout
from hybridrl.workers.rollout.request_engine import RequestEngine
from hybridrl.workers.rollout.requests import FinishReason, Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, StopCondition, advance, needs_history

# Tokens that a chunk adds to each of its requests. With fewer, prompts are computed again more often. With more, new
# requests wait longer.
CHUNK_TOKENS = 64


@dataclass
class _OpenRequest:
    request: Request
    version: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.tokens)

    @property
    def num_done(self) -> int:
        return self.request.num_done + len(self.tokens)

    def output(self, reason: FinishReason) -> TokenOutput:
        name = self.request.request_id
        routes = None if self.routes is None else stored([self.routes])[0]
        return TokenOutput(name, self.tokens, self.log_probs, reason, self.version, routes=routes)

    def add_routes(self, routes: np.ndarray) -> None:
        """Append a chunk's routes.

        Those of its prompt are known from the chunks in which its tokens were sampled.
        """
        known = routes[:0] if self.routes is None else self.routes
        end = len(self.request.prompt_ids) + len(self.tokens) - 1
        self.routes = np.concatenate([known, routes[len(known) : end]])


class BatchedRequestEngine(RequestEngine):
    """A `RequestEngine` whose step generates `CHUNK_TOKENS` tokens for the requests that fit into one batch."""

    rollout: Rollout

    def __init__(self, rollout: Rollout):
        super().__init__(rollout)
        self._open: dict[str, _OpenRequest] = {}

    def add(self, request: Request) -> None:
        self.rollout.stop_condition(request.sampling)  # raises here and not in the batch of others
        self._open[request.request_id] = _OpenRequest(request, self.rollout.current_version())

    def abort(self, request_id: str) -> TokenOutput | None:
        entry = self._open.pop(request_id, None)
        return None if entry is None else entry.output("abort")

    def step(self) -> list[TokenOutput]:
        batch = self._next_batch()
        width = min(CHUNK_TOKENS, max(entry.tokens_left for entry in batch))
        sampling, done = replace(batch[0].request.sampling, max_new_tokens=width), batch[0].num_done
        keys = torch.cat([advance(entry.request.key, len(entry.tokens)) for entry in batch])
        stop_condition = self.rollout.stop_condition(sampling)
        prompts = [[*entry.request.prompt_ids, *entry.tokens] for entry in batch]
        more = self.rollout.given_images([entry.request.images for entry in batch])
        num_done = done if needs_history(sampling, stop_condition) else 0
        generated = self.rollout.generate_tokens(prompts, keys, sampling, num_done=num_done, **more)
        rows = zip(
            batch, generated.tokens.tolist(), generated.log_probs.tolist(), generated.mask.sum(-1).tolist(), strict=True
        )
        return [
            output
            for (entry, tokens, log_probs, length), routes in zip(rows, generated.routes or repeat(None), strict=False)
            if (output := self._append_tokens(entry, tokens[:length], log_probs, stop_condition, routes=routes))
        ]

    def _next_batch(self) -> list[_OpenRequest]:
        """Return the oldest request and those that can be computed with it."""
        batch_keys = {name: self._batch_key(entry) for name, entry in self._open.items()}
        oldest = next(iter(batch_keys.values()))
        return [self._open[name] for name, batch_key in batch_keys.items() if batch_key == oldest][
            : self.rollout.setup.config.max_num_seqs
        ]

    def _batch_key(self, entry: _OpenRequest) -> tuple[SamplingParams, int]:
        """Return what requests of one batch must have in common."""
        sampling = replace(entry.request.sampling, max_new_tokens=1, seed=0)
        return sampling, entry.num_done if needs_history(sampling, self.rollout.stop_condition(sampling)) else 0

    def _append_tokens(
        self,
        entry: _OpenRequest,
        tokens: list[int],
        log_probs: list[float],
        stop_condition: StopCondition,
        *,
        routes: np.ndarray | None,
    ) -> TokenOutput | None:
        """Append a chunk's tokens to a request; return its output if it has finished."""
        tokens = tokens[: entry.tokens_left]
        entry.tokens += tokens
        entry.log_probs += log_probs[: len(tokens)]
        if routes is not None:
            entry.add_routes(routes)
        if not _has_stopped(entry, stop_condition) and entry.tokens_left:
            return None
        del self._open[entry.request.request_id]
        return entry.output("stop" if _has_stopped(entry, stop_condition) else "length")


def _has_stopped(entry: _OpenRequest, stop_condition: StopCondition) -> bool:
    if entry.tokens[-1] in stop_condition.ids:
        return True
    if stop_condition.strings is None or entry.num_done <= entry.request.sampling.min_tokens:
        return False
    # Tokens of earlier turns and of tools count, too, as in `TokenHistory`.
    tail = [*entry.request.prompt_ids[len(entry.request.prompt_ids) - entry.request.num_done :], *entry.tokens][
        -stop_condition.strings.window :
    ]
    return stop_condition.strings.completed_by_last(tail)
