"""Logits processing that depends on the response so far: penalties, minimum length, and stop strings.

Every rollout engine uses it in its worker process, with the same results. A call that needs none of it has no
`TokenHistory` and no cost. Not here: temperature, min-p, top-k, top-p and the draw itself (`sampler`).

Stop strings are found in decoded text, but the response keeps its sampled tokens: text is never encoded again.

Shapes: B prompts, S = B * n sequences, N sequences drawn now, V vocabulary, P prompt width, T maximum response tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hybridrl.errors import ConfigError
from hybridrl.workers.rollout.responses import padded
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, StopCondition

NO_TOKEN = -1  # padding
MAX_DETECTORS = 32  # sets of stop strings that a rollout keeps


class TokenHistory:
    """The tokens of S sequences: prompts as given, responses as they are drawn.

    num_done: how many of a prompt's last tokens already belong to its response (from earlier chunks).
    lengths: length limit (S,) of every response, lower than max_new_tokens once a stop string has ended it.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        stop_condition: StopCondition,
        *,
        num_done: int = 0,
        device: torch.device | str,
    ):
        self.sampling, self.stop_condition, self.num_done = sampling, stop_condition, num_done
        only_prompts = [tokens[: len(tokens) - num_done] for tokens in prompts]
        self._prompts = padded(only_prompts, fill=NO_TOKEN, device=device).repeat_interleave(sampling.n, dim=0)
        done = [tokens[len(tokens) - num_done :] for tokens in prompts]
        width = num_done + sampling.max_new_tokens
        self._responses = padded(done, width, fill=NO_TOKEN, device=device).repeat_interleave(sampling.n, dim=0)
        self.lengths = torch.full((len(self._responses),), sampling.max_new_tokens, device=device)

    def processor(
        self, logits: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor
    ) -> Callable[[slice], torch.Tensor]:
        """Return `process_logits` for parts of a batch, as `draw_tokens` needs it."""
        return lambda part: self.process_logits(logits[part], rows[part], steps[part])

    def process_logits(self, logits: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return logits (N, V) float32 with penalties and minimum length applied.

        The formulas are vLLM's. repetition_penalty divides positive and multiplies negative logits of tokens in prompt
        or response. frequency_penalty is subtracted for each occurrence in the response, presence_penalty once.

        Args:
            logits: (N, V) of token number `steps` (N,) of the sequences `rows` (N,).
        """
        logits = logits.to(torch.float32, copy=True)
        steps = steps + self.num_done
        if self.sampling.penalises:
            responses = self._responses[rows]
            responses = responses.masked_fill(
                torch.arange(responses.shape[1], device=responses.device) >= steps[:, None], NO_TOKEN
            )
            _penalise(logits, self._prompts[rows], responses, self.sampling)
        ids = [token for token in self.stop_condition.ids if token < logits.shape[-1]]
        if self.sampling.min_tokens and ids:
            early = (steps < self.sampling.min_tokens).nonzero().squeeze(-1)
            logits[early[:, None], torch.tensor(ids, device=logits.device)] = float("-inf")
        return logits

    def record(self, rows: torch.Tensor, steps: torch.Tensor, tokens: torch.Tensor) -> None:
        """Record tokens (N,) drawn as number `steps` (N,) of sequences `rows` (N,).

        A token may be drawn and recorded again, in which case the last one counts.
        """
        self._responses[rows, self.num_done + steps] = tokens
        strings = self.stop_condition.strings
        if strings is None:
            return
        lengths = []
        for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
            length = self.num_done + step + 1
            has_stopped = length > self.sampling.min_tokens and strings.completed_by_last(
                self._responses[row, max(0, length - strings.window) : length].tolist()
            )
            lengths.append(step + 1 if has_stopped else self.sampling.max_new_tokens)
        self.lengths[rows] = torch.tensor(lengths, dtype=torch.int64, device=rows.device)

    def stopped_before(self, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return which sequences (N,) bool had a complete stop string before token number `steps` (N,)."""
        return steps >= self.lengths[rows]


def _penalise(logits: torch.Tensor, prompts: torch.Tensor, responses: torch.Tensor, sampling: SamplingParams) -> None:
    """Apply penalties to logits (N, V) in place, for prompts (N, P) and responses (N, T).

    Changes only the logits of these tokens, so it costs nothing of the vocabulary's size.
    """
    if sampling.repetition_penalty != 1:
        places, _ = _places(torch.cat([prompts, responses], dim=1), logits.shape[-1])
        found = logits[places]
        scaled = torch.where(found > 0, found / sampling.repetition_penalty, found * sampling.repetition_penalty)
        logits[places] = scaled
    if sampling.frequency_penalty or sampling.presence_penalty:
        places, columns = _places(responses, logits.shape[-1])
        own = responses[places[0]]
        counts = (own == responses[places[0], columns][:, None]).sum(-1)
        logits[places] = logits[places] - sampling.frequency_penalty * counts - sampling.presence_penalty


def _places(tokens: torch.Tensor, vocab_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return row, token and column of each of tokens (N, T) in the vocabulary.

    A token that a row has several times is there several times: an assignment writes the same value again.
    """
    rows, columns = ((tokens >= 0) & (tokens < vocab_size)).nonzero(as_tuple=True)
    return (rows, tokens[rows, columns]), columns


class StopStrings:
    """Detects whether a response's last token completed one of `strings`. Special tokens count as their text.

    window: how many of a response's last tokens `completed_by_last` needs.
    """

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]):
        self._tokenizer, self._strings = tokenizer, strings
        self._can_end_cache: dict[int, bool] = {}  # token -> whether a stop string can end in it
        # Every token has at least one byte of text. One more, because some tokenizers drop the first token's leading
        # space.
        self.window = max(len(text.encode()) for text in strings) + 1

    def completed_by_last(self, tokens: list[int]) -> bool:
        """Return whether the last token completed a stop string in the text of these tokens."""
        if not self._can_end(tokens[-1]):
            return False
        text, before = self._text(tokens), self._text(tokens[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self._strings)

    def _can_end(self, token: int) -> bool:
        if token not in self._can_end_cache:
            text = self._text([token])
            # A token with part of a character has no text of its own.
            self._can_end_cache[token] = "\N{REPLACEMENT CHARACTER}" in text or any(
                stop[-1] in text for stop in self._strings
            )
        return self._can_end_cache[token]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopStringCache:
    """Detectors for the sets of stop strings that were used last.

    Clients of an endpoint choose their own strings, so old detectors are forgotten. All share one tokenizer, the
    model's.
    """

    def __init__(self, model_path: str, *, trust_remote_code: bool):
        self._model_path, self._trust_remote_code = model_path, trust_remote_code
        self._tokenizer: Any = None
        self._detectors: OrderedDict[tuple[str, ...], StopStrings] = OrderedDict()

    def __len__(self) -> int:
        return len(self._detectors)

    def detector(self, strings: tuple[str, ...]) -> StopStrings:
        """Return the detector for these strings.

        Raises:
            ConfigError: the model has no tokenizer, or the tokenizer cannot produce one of the strings.
        """
        if strings not in self._detectors:
            self._detectors[strings] = self._load(strings)
        self._detectors.move_to_end(strings)
        while len(self._detectors) > MAX_DETECTORS:
            self._detectors.popitem(last=False)
        return self._detectors[strings]

    def _load(self, strings: tuple[str, ...]) -> StopStrings:
        from transformers import AutoTokenizer

        key = f"actor_rollout_ref.rollout.stop={list(strings)}"
        hint = "put the model's tokenizer there, or use actor_rollout_ref.rollout.stop_token_ids"
        path = self._model_path
        try:
            if self._tokenizer is None:
                self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=self._trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{key}: stop strings need a tokenizer in the directory of the model {path!r}: {error}; {hint}"
            ) from error
        if unknown := unwritable_strings(self._tokenizer, strings):
            raise ConfigError(
                f"{key}: the tokenizer in {path!r} cannot produce {unknown}, so they would never stop a response; "
                f"{hint}"
            )
        return StopStrings(self._tokenizer, strings)


def unwritable_strings(tokenizer: Any, strings: Iterable[str]) -> list[str]:
    """Return the strings that the tokenizer cannot produce, for instance because it normalizes them.

    Without their files some tokenizer classes load with an empty vocabulary.
    """
    return [text for text in strings if text not in tokenizer.decode(tokenizer.encode(text))]
