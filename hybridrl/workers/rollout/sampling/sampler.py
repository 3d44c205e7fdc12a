"""Sampling parameters, stateless random numbers, and the one sampler that every rollout engine uses.

A draw depends on three integers only: the seed of its prompt row, the sample number and the token number. It does not
depend on rank, batch, engine or order, and needs no generator per sequence. The engines call it in their worker
processes; the driver builds `SamplingParams` from the settings (`sampling_params`).

Shapes: B prompts, S = B * n sequences, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridrl.config.schema.ppo import PPOConfig

# SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195): the step of its counter and the finalizer's
# multipliers, as signed 64-bit numbers. int64 products wrap, which is the arithmetic modulo 2^64 that SplitMix64 needs.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

CPU_CHUNK_ELEMENTS = 2**20
"""Probabilities that exist at a time on a CPU: 4 MiB of float32, and 8 of their sums."""
DEVICE_CHUNK_ELEMENTS = 2**26
"""Those elsewhere, enough to hide the launch overhead."""


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names and meanings are vLLM's.

    temperature, top_k, top_p and min_p have no effect if do_sample is false (greedy).
    stop, stop_token_ids: a response ends with the token that completes one of these texts, or with one of these tokens,
        and keeps it.
    min_tokens: minimum number of tokens before a response may end.
    """

    max_new_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    do_sample: bool = True
    seed: int = 0
    ignore_eos: bool = False
    logprobs: bool = True

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "n": (self.n >= 1, "at least 1"),
            "temperature": (self.temperature > 0, "above 0; for greedy decoding set do_sample=False"),
            "top_k": (self.top_k >= -1, "-1 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]; 0 is off"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 is off"),
            "min_tokens": (self.min_tokens >= 0, "0 (off) or more"),
            "stop": (isinstance(self.stop, tuple) and all(self.stop), "a tuple of non-empty strings"),
            "stop_token_ids": (all(token >= 0 for token in self.stop_token_ids), "token ids, 0 or more"),
            "ignore_eos": (not (self.ignore_eos and self.stop), "false where `stop` ends responses"),
        }
        for name, (holds, rule) in limits.items():
            if not holds:
                raise ValueError(f"sampling {name}={getattr(self, name)!r}: it must be {rule}")

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class StopCondition:
    """The token ids, and the strings (`logits.StopStrings`; None: no strings) that end a response."""

    ids: tuple[int, ...]
    strings: Any = None


def needs_history(sampling: SamplingParams, stop_condition: StopCondition) -> bool:
    """Return whether the next token depends on the response so far or on its length."""
    return sampling.penalises or sampling.min_tokens > 0 or stop_condition.strings is not None


def default_seeds(seed: int, num_rows: int) -> torch.Tensor:
    """Return seeds (num_rows,) int64 for the rows of a batch that has no `seeds` column."""
    start = torch.tensor(seed, dtype=torch.int64)
    return _mix(_mix(start) + torch.arange(num_rows))


def sequence_keys(seeds: torch.Tensor, n: int) -> torch.Tensor:
    """Return the keys (B * n,) int64 of all sequences for `seeds` (B,) int64; samples of a row are adjacent."""
    return _mix(_mix(seeds)[:, None] + torch.arange(n, device=seeds.device)).reshape(-1)


def advance(keys: torch.Tensor, steps: int) -> torch.Tensor:
    """Return keys whose streams start at element `steps` of the streams of `keys` (S,) int64."""
    return keys + torch.tensor(steps, dtype=torch.int64, device=keys.device) * _GAMMA


def uniforms(keys: torch.Tensor, steps: int | torch.Tensor) -> torch.Tensor:
    """Return uniform numbers (S,) float64 in [0, 1) from each key's SplitMix64 stream.

    The finalizer maps consecutive counters to 64 bits that pass the usual statistical batteries. The upper 53 bits
    become the number.

    Args:
        keys: (S,) int64.
        steps: the element of the stream, one for all rows or (S,).
    """
    counter = torch.as_tensor(steps, dtype=torch.int64, device=keys.device) + 1
    return _logical_shift(_mix(keys + counter * _GAMMA), 11).double() * 2.0**-53


def draw_tokens(
    logits: torch.Tensor,
    uniform: torch.Tensor | None,
    sampling: SamplingParams,
    *,
    process: Callable[[slice], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next tokens (S,) int64 and their log-probs (S,) float32.

    The log-prob is the model's, as training computes it: that of softmax(logits / temperature), before penalties,
    min-p, top-k and top-p. For greedy sampling it is that of softmax(logits). A row depends on no other row, so
    probabilities exist for some rows at a time.

    Args:
        logits: the model's, (S, V) of any float dtype.
        uniform: (S,) float64, from `uniforms`; not used for greedy sampling.
        process: returns for a part of the rows the logits to draw from instead of the model's.
    """
    elements = CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    rows = max(1, elements // logits.shape[1])
    drawn = []
    for start in range(0, max(1, len(logits)), rows):
        part = slice(start, start + rows)
        numbers = None if uniform is None else uniform[part]
        processed = None if process is None else process(part)
        drawn.append(_draw_rows(logits[part], numbers, sampling, processed))
    tokens, log_probs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def without_tokens(
    never: torch.Tensor, logits: torch.Tensor, process: Callable[[slice], torch.Tensor] | None
) -> Callable[[slice], torch.Tensor]:
    """Return a `process` of `draw_tokens` after which the tokens `never` are not drawn.

    They are those that stand for images: one in a response would have no image. Log-probs stay those of the model.
    """
    earlier = process or (lambda part: logits[part])
    return lambda part: earlier(part).float().index_fill(-1, never, float("-inf"))


def _draw_rows(
    logits: torch.Tensor, uniform: torch.Tensor | None, sampling: SamplingParams, processed_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if not sampling.do_sample:
        log_probs = logits.float().log_softmax(-1)
        tokens = (logits if processed_logits is None else processed_logits).argmax(-1)
    else:
        assert uniform is not None, "only greedy sampling draws no numbers"
        log_probs = (logits.float() / sampling.temperature).log_softmax(-1)
        probs = log_probs.exp() if processed_logits is None else (processed_logits / sampling.temperature).softmax(-1)
        tokens = _invert_cdf(
            _apply_top_k_top_p(_apply_min_p(probs, sampling.min_p), sampling.top_k, sampling.top_p), uniform
        )
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _apply_min_p(probs: torch.Tensor, min_p: float) -> torch.Tensor:
    """Return probs (S, V) with zeros for tokens below min_p times the largest probability of their row."""
    return probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0) if min_p > 0 else probs


def _apply_top_k_top_p(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return probs (S, V) with zeros outside the top k tokens, then outside the smallest set with share top_p."""
    vocab_size = probs.shape[-1]
    num_kept = min(top_k, vocab_size) if top_k > 0 else vocab_size
    if num_kept == vocab_size and top_p >= 1:
        return probs
    values, index = (
        probs.sort(dim=-1, descending=True, stable=True) if num_kept == vocab_size else probs.topk(num_kept, dim=-1)
    )
    if top_p < 1:
        mass = values.double().cumsum(-1)
        values = values.masked_fill(mass - values >= top_p * mass[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter(-1, index, values)


def _invert_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return for each row the first token whose cumulative weight exceeds `uniform` times the row's sum.

    The sum runs over the vocabulary in its own order, in float64: with 150 000 tokens, float32 would lose the rare
        ones.
    """
    mass = weights.double().cumsum(-1)  # six times faster than cumsum(dtype=torch.float64)
    tokens = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True).squeeze(-1)
    # NaN logits would give an index past the vocabulary, and on CUDA an index out of range ends the process.
    return tokens.clamp_(max=weights.shape[-1] - 1)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's finalizer of int64 values: every input bit affects every output bit."""
    values = (values ^ _logical_shift(values, 30)) * _MULTIPLIERS[0]
    values = (values ^ _logical_shift(values, 27)) * _MULTIPLIERS[1]
    return values ^ _logical_shift(values, 31)


def _logical_shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return values >> bits with zeros shifted in (torch's >> repeats the sign)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def sampling_params(config: PPOConfig, *, validate: bool, seed: int, greedy: bool = False) -> SamplingParams:
    """Return the settings' sampling parameters for training or validation.

    seed: for batches whose rows have no seeds.
    greedy: one greedy response per prompt, otherwise as in training.
    """
    rollout = config.actor_rollout_ref.rollout
    chosen = rollout.val_kwargs if validate else rollout
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        n=1 if greedy and not validate else chosen.n,
        do_sample=rollout.val_kwargs.do_sample if validate else not greedy,
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        logprobs=rollout.calculate_log_probs and not validate,
        seed=seed,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        min_tokens=rollout.min_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )
