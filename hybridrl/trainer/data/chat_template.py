"""Turn chat messages into token ids by the tokenizer's chat template, and truncate token ids.

Used by the datasets of PPO and SFT, in the driver.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hybridrl.errors import DataError

MAX_CHARACTERS = 10_000_000  # of a message: a tokenizer takes 50 times its memory, and panics above some length
TOKENIZE_ROWS = 1000  # per tokenizer call: enough to use its threads, few enough to stay small in memory


def check_messages(value: Any, location: str) -> list[dict]:
    """Return the messages of one row without the keys that parquet filled with nulls.

    Args:
        value: Content of the row's column.
        location: File and row, for errors.

    Raises:
        DataError: The value is not a non-empty list of messages with a role and a content.
    """
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{location}: expected a non-empty list of messages with role and content, found {value!r:.100}"
        )
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message.get("content") is None:
            raise DataError(f"{location}: expected a message with role and content, found {message!r:.100}")
        check_length(message["content"], location)
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def reject_json_text(text: str, location: str) -> None:
    """Raise DataError for messages that an export wrote as JSON text, which a model would read as they are."""
    if not text.lstrip().startswith("["):
        return
    try:
        check_messages(json.loads(text), location)
    except (ValueError, RecursionError, DataError):
        return
    raise DataError(
        f"{location}: the text is a list of messages as JSON, {text!r:.60}, and would be trained on as it is; parse "
        "the column with json.loads, for instance table.map(lambda row: {'prompt': json.loads(row['prompt'])})"
    )


def check_length(text: Any, location: str) -> None:
    """Raise DataError for a text that is too long for a tokenizer."""
    if isinstance(text, str) and len(text) > MAX_CHARACTERS:
        raise DataError(f"{location}: a text has {len(text)} characters, at most {MAX_CHARACTERS} can be tokenized")


def render(
    tokenizer: Any, conversations: list[list[dict]], location: Callable[[int], str], **kwargs: Any
) -> dict[str, list]:
    """Render several conversations with the tokenizer's chat template, and tokenize them.

    Args:
        location: Returns file and row of conversation i, for errors.
        **kwargs: For `apply_chat_template`.

    Returns:
        `input_ids`, and `assistant_masks` if requested; one list per conversation.

    Raises:
        DataError: The tokenizer has no template, or the template rejects a conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{location(0)} has chat messages, but the tokenizer has no chat template; add one, or use strings"
        )
    try:
        return tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True, **kwargs)
    except Exception as error:  # a template may raise anything: jinja errors, TypeError, ValueError
        if len(conversations) == 1:
            raise DataError(
                f"{location(0)}: the chat template rejects this conversation: {type(error).__name__}: {error}"
            ) from error
    for i, conversation in enumerate(conversations):
        render(tokenizer, [conversation], partial(lambda row, _: location(row), i), **kwargs)
    raise DataError(
        f"{location(0)} and {len(conversations) - 1} rows after it: the chat template fails on them, but on none alone"
    )


def overlong_error(
    lengths: Sequence[int], limit: int, location: Callable[[int], str], *, what: str, key: str, way_out: str
) -> DataError:
    """Return the error about rows of more tokens than a setting allows; at least one row is such.

    Args:
        lengths: Tokens of every row.
        limit: What `key` allows.
        location: Returns file and row of a row.
        what: A row, such as "a prompt".
        key: The setting.
        way_out: What else to do than to raise it.
    """
    too_long = [row for row, length in enumerate(lengths) if length > limit]
    first = too_long[0]
    return DataError(
        f"{location(first)}: {what} of {lengths[first]} tokens is longer than {key}={limit} ({len(too_long)} of "
        f"{len(lengths)} are, the longest has {max(lengths)}); raise {key}, or {way_out}"
    )


def truncate(tokens: np.ndarray, limit: int, side: str) -> np.ndarray:
    """Return at most `limit` tokens; `side` (left, right or middle) says which part is dropped."""
    if len(tokens) <= limit:
        return tokens
    if side == "left":
        return tokens[-limit:]
    if side == "right":
        return tokens[:limit]
    head = limit // 2
    return np.concatenate([tokens[:head], tokens[len(tokens) - (limit - head) :]])
