"""Token-in/token-out requests, and their outputs.

The router and the agent loops (driver) build requests. A `RequestEngine` (worker process) serves them.
A `ParityGate` (driver) builds probes, which every rollout process answers after a push (`probe.py`).
Not here: text, templates and stop strings, which serving turns into token ids and `SamplingParams`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.errors import DataError
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, advance, sequence_keys

FinishReason = Literal["stop", "length", "abort", "pause", "error"]
NOT_SAMPLED = -1  # version of the weights of a token that no policy sampled


@dataclass(frozen=True)
class Request:
    """One response to generate, or the next part of one.

    prompt_ids: all tokens so far.
    sampling: with n = 1; `max_new_tokens` is this request's own limit.
    seed, sample: the response is number `sample` of the prompt with this seed, as in a batch with `n` samples.
    num_done: how many of the last prompt_ids already belong to the response (sampled in earlier turns, or returned by
        tools). Random numbers continue from there.
    num_before: tokens of the response before those that num_done counts: earlier turns of an agent, whose random
        numbers begin anew with each turn. Only the driver reads it, for the shares of partial rollouts.
    images: of the tokens so far; None for a request of text.
    adapter: number of the adapter that generates, in an engine with adapters of its own; 0: none.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    sample: int = 0
    num_done: int = 0
    num_before: int = 0
    images: RowImages | None = field(default=None, compare=False)
    adapter: int = 0

    def __post_init__(self) -> None:
        if self.sampling.n != 1:
            raise ValueError(
                f"request {self.request_id}: sampling n={self.sampling.n}; a request is one response, send "
                f"{self.sampling.n}"
            )
        if not 0 <= self.num_done < len(self.prompt_ids):
            raise DataError(
                f"request {self.request_id}: {len(self.prompt_ids)} tokens with num_done={self.num_done} of them in "
                "the response leave no prompt"
            )

    @property
    def key(self) -> torch.Tensor:
        """Return the key (1,) int64 of its stream of random numbers, for `uniforms`."""
        keys = sequence_keys(torch.tensor([self.seed], dtype=torch.int64), self.sample + 1)
        return advance(keys[self.sample :], self.num_done)


@dataclass(frozen=True)
class TokenOutput:
    """The tokens sampled for a request.

    finish_reason: "stop": ended by a stop token or stop string, which is included. "length": reached max_new_tokens.
        "abort": aborted by the caller, with the tokens so far. "pause": interrupted by a push of weights, a move to
        another replica or the end of its share; the caller continues it. "error": the request cannot
        be served, and `error` has the reason; there are no tokens.
    version: of the oldest weights that produced one of the tokens; -1 if there are none.
    mixed: the version of each token, if they differ.
    routes: entry of the column `routed_experts` of prompt and tokens, where the rollout returns routes.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version: int
    mixed: tuple[int, ...] = ()
    error: str = ""
    routes: Any = field(default=None, compare=False)

    @classmethod
    def of_error(cls, request_id: str, error: Exception) -> "TokenOutput":
        """Return the output of a request that raised an error."""
        return cls(request_id, [], [], "error", -1, error=f"{type(error).__name__}: {error}")

    @property
    def token_versions(self) -> list[int]:
        """Return the version of the weights that produced each token."""
        return list(self.mixed) or [self.version] * len(self.token_ids)


@dataclass(frozen=True)
class Probe:
    """Prompts whose next tokens a rollout samples after a push.

    Attributes:
        prompts: Token ids without padding.
        max_new_tokens: Most tokens for each.
        temperature: Of the sampling.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True)
class ProbedTokens:
    """What a rollout sampled for a probe.

    Attributes:
        token_ids: Sampled tokens of each prompt.
        log_probs: Log-prob of each of them.
        dtype: Dtype of the rollout's weights.
        device: "cpu" or "cuda".
        time_s: Seconds that the sampling took.
    """

    token_ids: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]
    dtype: torch.dtype
    device: str
    time_s: float
