"""What a response has so far, where its next token depends on it: penalties, least length, stop strings. Every engine
uses it alike.

A call whose sampling asks for none of these has no `History`, and pays for none.

Shapes: B prompts, S = B * n sequences, N of them drawn now, V vocabulary, T tokens that a response may have in all.

Texts that end a response. Tokens stay what they were: the response keeps those that made the text, and text is only
looked at.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hybridrl.errors import ConfigError
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

NO_TOKEN = -1  # in a place that holds none


@dataclass(frozen=True)
class Ends:
    """What ends a response: token ids, and strings (None: no strings)."""

    ids: tuple[int, ...]
    strings: "StopStrings | None" = None


class History:
    """The tokens of S sequences: prompts as given, responses as they are drawn.

    num_done: how many of a prompt's last tokens are the beginning of its response already (an earlier piece of it).
    """

    def __init__(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        ends: Ends,
        *,
        num_done: int = 0,
        device: torch.device | str,
    ):
        self.sampling, self.ends, self.num_done = sampling, ends, num_done
        heads = [tokens[: len(tokens) - num_done] for tokens in prompts]
        self._heads = _padded(heads, max(map(len, heads)), device).repeat_interleave(sampling.n, dim=0)
        done = [tokens[len(tokens) - num_done :] for tokens in prompts]
        self._made = _padded(done, num_done + sampling.max_new_tokens, device).repeat_interleave(sampling.n, dim=0)
        self.lengths = torch.full((len(self._made),), sampling.max_new_tokens, device=device)

    @classmethod
    def start(
        cls,
        prompts: list[list[int]],
        sampling: SamplingParams,
        ends: Ends,
        *,
        num_done: int,
        device: torch.device | str,
    ) -> "History | None":
        """Return a history for one call, or None if nothing in it depends on one."""
        wanted = sampling.penalises or sampling.min_tokens > 0 or ends.strings is not None
        return cls(prompts, sampling, ends, num_done=num_done, device=device) if wanted else None

    def shape(self, logits: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return logits (N, V) float32 as penalties and the least length make them, of the tokens `steps` (N,) of
        sequences `rows` (N,).

        As vLLM does: repetition_penalty divides positive and multiplies negative logits of tokens in prompt or
        response, frequency_penalty is subtracted for each occurrence in the response, presence_penalty once.
        """
        logits = logits.float().clone()
        steps = steps + self.num_done
        if self.sampling.penalises:
            made = self._made[rows]
            made = made.masked_fill(torch.arange(made.shape[1], device=made.device) >= steps[:, None], NO_TOKEN)
            logits = _penalised(logits, self._heads[rows], made, self.sampling)
        ids = [token for token in self.ends.ids if token < logits.shape[-1]]
        if self.sampling.min_tokens and ids:
            early = (steps < self.sampling.min_tokens).nonzero().squeeze(-1)
            logits[early[:, None], torch.tensor(ids, device=logits.device)] = float("-inf")
        return logits

    def record(self, rows: torch.Tensor, steps: torch.Tensor, tokens: torch.Tensor) -> None:
        """Take up tokens (N,) drawn as numbers `steps` (N,) of sequences `rows` (N,); see `ended`.

        A token may be drawn again.
        """
        self._made[rows, self.num_done + steps] = tokens
        if self.ends.strings is None:
            return
        lengths = []
        for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
            length = self.num_done + step + 1
            stops = length > self.sampling.min_tokens and self.ends.strings.completed_by_last(self._tail(row, length))
            lengths.append(step + 1 if stops else self.sampling.max_new_tokens)
        self.lengths[rows] = torch.tensor(lengths, dtype=torch.int64, device=rows.device)

    def ended(self, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return which of the sequences (N,) bool had a stop string before their token number `steps` (N,)."""
        return steps >= self.lengths[rows]

    def _tail(self, row: int, length: int) -> list[int]:
        return self._made[row, max(0, length - self.ends.strings.window) : length].tolist()


def _padded(lists: list[list[int]], width: int, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(
        [tokens + [NO_TOKEN] * (width - len(tokens)) for tokens in lists], dtype=torch.int64, device=device
    )


def _penalised(logits: torch.Tensor, head: torch.Tensor, made: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return logits (N, V) with penalties for the tokens of head (N, P) and made (N, T)."""
    counts = _counts(made, logits.shape[-1])
    if sampling.repetition_penalty != 1:
        seen = (counts + _counts(head, logits.shape[-1])) > 0
        logits = torch.where(seen & (logits > 0), logits / sampling.repetition_penalty, logits)
        logits = torch.where(seen & (logits < 0), logits * sampling.repetition_penalty, logits)
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _counts(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return how often each token of the vocabulary (N, V) float32 is in tokens (N, T)."""
    counts = torch.zeros(len(tokens), vocab_size + 1, device=tokens.device)  # one more, for places without a token
    return counts.scatter_add_(1, tokens % (vocab_size + 1), torch.ones_like(tokens, dtype=torch.float32))[
        :, :vocab_size
    ]


class StopStrings:
    """Tells whether a response's last token completed one of `strings`. Special tokens count as their text.

    window: how many of a response's last tokens it has to see.
    """

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]):
        self._tokenizer, self._strings = tokenizer, strings
        self._may_end: dict[int, bool] = {}  # token -> whether a stop string can end in it
        # A token has a byte of text at least; one more, because some tokenizers drop the first one's leading space.
        self.window = max(len(text.encode()) for text in strings) + 1

    def completed_by_last(self, tokens: list[int]) -> bool:
        """Return whether a stop string is in the text of tokens and was not before the last of them."""
        if not self._can_end(tokens[-1]):
            return False
        text, before = self._text(tokens), self._text(tokens[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self._strings)

    def _can_end(self, token: int) -> bool:
        if token not in self._may_end:
            text = self._text([token])
            # Part of a character has no text of its own.
            self._may_end[token] = "\N{REPLACEMENT CHARACTER}" in text or any(
                stop[-1] in text for stop in self._strings
            )
        return self._may_end[token]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_stop_strings(strings: tuple[str, ...], *, model_path: str, trust_remote_code: bool) -> StopStrings:
    """Return the check for these strings with the model's tokenizer; a model without one is a ConfigError."""
    from transformers import AutoTokenizer

    key = f"actor_rollout_ref.rollout.stop={list(strings)}"
    way_out = "put the model's tokenizer there, or use actor_rollout_ref.rollout.stop_token_ids"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: stop strings need a tokenizer beside the model {model_path!r}: {error}; {way_out}"
        ) from error
    # Where its files are absent, some classes come up with an empty vocabulary.
    foreign = [text for text in strings if text not in tokenizer.decode(tokenizer.encode(text))]
    if foreign:
        raise ConfigError(
            f"{key}: the tokenizer in {model_path!r} cannot write {foreign}, so nothing would stop there; {way_out}"
        )
    return StopStrings(tokenizer, strings)
