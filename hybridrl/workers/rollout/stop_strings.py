"""Texts that end a response. Tokens stay what they were: the response keeps those that made the text, and text is only looked at."""

from typing import Any

from hybridrl.errors import ConfigError


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
            self._may_end[token] = "\N{REPLACEMENT CHARACTER}" in text or any(stop[-1] in text for stop in self._strings)
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
        raise ConfigError(f"{key}: stop strings need a tokenizer beside the model {model_path!r}: {error}; {way_out}") from error
    # Where its files are absent, some classes come up with an empty vocabulary.
    foreign = [text for text in strings if text not in tokenizer.decode(tokenizer.encode(text))]
    if foreign:
        raise ConfigError(f"{key}: the tokenizer in {model_path!r} cannot write {foreign}, so nothing would stop there; {way_out}")
    return StopStrings(tokenizer, strings)
