"""Chat messages to token ids by the tokenizer's own template, and what to do with too many of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hybridrl.errors import DataError

TOKENIZE_ROWS = 1000  # rows given to the tokenizer at once: enough to use its threads, few enough to keep in memory


def check_messages(value: Any, place: str) -> list[dict]:
    """Return the messages of one row without the keys that parquet filled with nulls.

    Raises:
        DataError: The value is not a non-empty list of messages with a role and a content.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: expected a non-empty list of messages with role and content, found {value!r:.100}")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message.get("content") is None:
            raise DataError(f"{place}: expected a message with role and content, found {message!r:.100}")
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def render(
    tokenizer: Any, conversations: list[list[dict]], place: Callable[[int], str], **kwargs: Any
) -> dict[str, list]:
    """Return what the tokenizer's chat template makes of several conversations: `input_ids`, and `assistant_masks` if
    asked for.

    Raises:
        DataError: The tokenizer has no template, or the template refuses a conversation; `place(i)` says which.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{place(0)} holds chat messages, but the tokenizer has no chat template; give it one, or use strings"
        )
    try:
        return tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True, **kwargs)
    except Exception as error:  # a template raises what it likes: jinja's errors, TypeError, ValueError
        if len(conversations) == 1:
            raise DataError(
                f"{place(0)}: the chat template refuses this conversation: {type(error).__name__}: {error}"
            ) from error
    for i, conversation in enumerate(conversations):
        render(tokenizer, [conversation], lambda _, i=i: place(i), **kwargs)
    raise DataError(
        f"{place(0)} and {len(conversations) - 1} rows after it: the chat template fails on them, but on none alone"
    )


def truncate(tokens: np.ndarray, limit: int, side: str) -> np.ndarray:
    """Return at most `limit` tokens: `left` drops the beginning, `right` the end, `middle` what is
    between two halves.
    """
    if len(tokens) <= limit:
        return tokens
    if side == "left":
        return tokens[-limit:]
    if side == "right":
        return tokens[:limit]
    head = limit // 2
    return np.concatenate([tokens[:head], tokens[len(tokens) - (limit - head) :]])
