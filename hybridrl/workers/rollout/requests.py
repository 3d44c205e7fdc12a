"""Token-in/token-out requests: what a rollout process is asked for, what it returns, and what an
engine does with them.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hybridrl.errors import DataError
from hybridrl.workers.rollout.sampling.logits import Ends
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, advance, sequence_keys

FinishReason = Literal["stop", "length", "abort", "pause"]


@dataclass(frozen=True)
class Request:
    """One response to be made, or its next part.

    prompt_ids: all tokens so far. sampling: with n = 1; `max_new_tokens` is this request's own. seed, sample: it is
    sample number `sample` of the prompt with this seed, as in a batch with `n` of them. num_done: how many of the last
    prompt_ids belong to the response already (what was sampled in earlier turns, and what tools said): random numbers
    go on from there.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    sample: int = 0
    num_done: int = 0

    def __post_init__(self) -> None:
        if self.sampling.n != 1:
            raise ValueError(
                f"request {self.request_id}: sampling n={self.sampling.n}; a request is one response, send "
                f"{self.sampling.n}"
            )
        if not 0 <= self.num_done < len(self.prompt_ids):
            raise DataError(
                f"request {self.request_id}: {len(self.prompt_ids)} tokens, {self.num_done} of them "
                "response, leave no prompt"
            )

    @property
    def key(self) -> torch.Tensor:
        """The key (1,) int64 of its stream of random numbers, as `uniforms` wants it."""
        keys = sequence_keys(torch.tensor([self.seed], dtype=torch.int64), self.sample + 1)
        return advance(keys[self.sample :], self.num_done)


@dataclass(frozen=True)
class TokenOutput:
    """What was sampled for a request.

    finish_reason: "stop" ended by a token or text that ends responses (it is included), "length" at max_new_tokens,
    "abort" as told, with what there was, "pause" the same because of a push of weights. version: of the oldest weights
    that made a token of it, -1 if nothing was made. mixed: the version of each token, where not all are of the same
    weights.
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


class RequestEngine(Protocol):
    """Requests in, tokens out, in steps that take a moment."""

    def add(self, request: Request) -> None: ...

    def step(self) -> list[TokenOutput]:
        """Work on the open requests for a moment; return those that ended."""

    def abort(self, request_id: str) -> TokenOutput | None:
        """End an open request; None if there is none of this name."""

    def num_open(self) -> int: ...

    def is_open(self, request_id: str) -> bool: ...


def looks_back(sampling: SamplingParams, ends: Ends) -> bool:
    """Whether the next token depends on how many the response has."""
    return sampling.penalises or sampling.min_tokens > 0 or ends.strings is not None
