"""Datasets of preferences: pairs of responses, or single responses with a label, tokenized when they are made.

`DPOTrainer` and `RMTrainer` use them in the driver. A prompt is text or a list of messages. A response is text, the
assistant's messages, or the whole conversation. With a chat template, text is one message of the user or the assistant.
Without one, prompt and response are tokenized as they are, and the end-of-sequence token is added to the response.

Shapes: N rows of the data in a batch, B sequences, L tokens of the longest, R = L - 1.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema.preference import DPODataConfig, PairDataConfig
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer import data as data_room
from hybridrl.trainer.data.chat_template import TOKENIZE_ROWS, check_messages, overlong_error, render
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_dataset import as_messages
from hybridrl.trainer.data.sequences import collate_sequences, end_of_turn
from hybridrl.trainer.data.tokenizer import pad_token_id

logger = logging.getLogger(__name__)
Tokens = tuple[np.ndarray, np.ndarray]  # prompt and response, each (length,) int32
Locate = Callable[[int], str]  # position in a list of rows -> file and row, for errors


class PreferenceDataset:
    """Rows with a prompt and one or more responses to it.

    Args:
        data_files: Parquet files; one path or a list.
        tokenizer: A Hugging Face tokenizer.
        config: Settings `data`: columns, length limit, what to do with longer rows.
        max_samples: Use only the first rows; -1 means all.
        processor: Of a model that reads images, see `workers/images`.

    Raises:
        DataError: A file or column is missing, a row cannot be used, a sequence is longer than `data.max_length` with
            `data.truncation=error`, or no row is left.
    """

    def __init__(
        self,
        data_files: list[str] | str,
        tokenizer: Any,
        config: PairDataConfig,
        *,
        max_samples: int = -1,
        processor: Any = None,
    ):
        self.tokenizer, self.config = tokenizer, config
        self._rows = ParquetRows(data_files)
        self._images = data_room.ImageColumn(self._rows, config.image_key, processor)
        self._num_rows = len(self._rows) if max_samples < 0 else min(max_samples, len(self._rows))
        for key in self.column_settings():
            if getattr(config, key) is not None:
                self._rows.require(getattr(config, key), f"data.{key}")
        self._check()
        self._blank = self._blank_rows()
        self._responses = [self._tokenize(key) for key in self.response_settings()]
        self._selected_rows = self._select_rows()

    def response_settings(self) -> tuple[str, ...]:
        """Return the settings that name columns with responses."""
        raise NotImplementedError

    def column_settings(self) -> tuple[str, ...]:
        """Return all settings that name columns."""
        return ("prompt_key", *self.response_settings())

    def _check(self) -> None:
        """Raise DataError for rows that cannot be used, before any is tokenized."""

    def __len__(self) -> int:
        return len(self._selected_rows)

    def __getitem__(self, position: int) -> dict:
        """Return `sequences`: for each response a dict as `collate_sequences` takes it."""
        row = self._selected_rows[position]
        return {"sequences": self._sequences(row, self._responses)}

    def _sequences(self, row: int, responses: Sequence[list[Tokens]]) -> list[dict]:
        """Return a row's prompt with each of these responses. They share the images of the prompt."""
        found = [_sequence(*tokens[row]) for tokens in responses]
        prompt, columns = self._images.inputs(row, responses[0][row][0])
        if columns:
            found = [_sequence(prompt, tokens[row][1]) | columns for tokens in responses]
        return found

    def collate(self, rows: list[dict]) -> DataProto:
        """Return `collate_sequences` of all sequences, row by row."""
        sequences = [sequence for row in rows for sequence in row["sequences"]]
        return collate_sequences(sequences, pad_token_id(self.tokenizer))

    def column(self, key: str) -> Iterator[tuple[int, Any]]:
        """Yield (row, value) of the column that the setting `key` names."""
        column = getattr(self.config, key)
        for start, values in self._rows.values(column, batch=TOKENIZE_ROWS, limit=self._num_rows):
            yield from enumerate(values, start)

    def _blank_rows(self) -> set[int]:
        """Return the rows with a response of white space only, which `data.truncation=filter` leaves out.

        Raises:
            DataError: There is one, and `data.truncation` is `error`.
        """
        keys = {row: key for key in self.response_settings() for row, value in self.column(key) if is_blank(value)}
        if keys and self.config.truncation == "error":
            first = min(keys)
            raise self.error(
                first,
                f"column {getattr(self.config, keys[first])!r} is blank ({len(keys)} of {self._num_rows} rows have a "
                "blank response), and a chat template would drop it; remove these rows, or leave them out with "
                "data.truncation=filter",
            )
        if keys:
            logger.info("left out %d of %d rows, which have a blank response", len(keys), self._num_rows)
        return set(keys)

    def error(self, row: int, problem: str) -> DataError:
        """Return an error with file and row."""
        return DataError(f"{self._rows.location(row)}: {problem}")

    def check_pairs(self) -> None:
        """Raise DataError for a pair of equal responses, which is no preference."""
        pairs = zip(self.column("chosen_key"), self.column("rejected_key"), strict=True)
        equal = [row for (row, chosen), (_, rejected) in pairs if chosen == rejected]
        if equal:
            raise self.error(
                equal[0],
                f"columns {self.config.chosen_key!r} and {self.config.rejected_key!r} are equal ({len(equal)} of "
                f"{self._num_rows} rows are), which is no preference; remove these rows",
            )

    def _tokenize(self, key: str) -> list[Tokens]:
        limits = {"batch": TOKENIZE_ROWS, "limit": self._num_rows}
        prompts = self._rows.values(self.config.prompt_key, **limits)
        responses = self._rows.values(getattr(self.config, key), **limits)
        empty = np.zeros(0, dtype=np.int32)
        found: list[Tokens] = [(empty, empty)] * self._num_rows
        for (start, some_prompts), (_, some_responses) in zip(prompts, responses, strict=True):
            kept = [i for i in range(len(some_prompts)) if start + i not in self._blank]
            locate = lambda i, start=start, kept=kept: self._rows.location(start + kept[i])  # noqa: E731
            pairs = [some_prompts[i] for i in kept], [some_responses[i] for i in kept]
            opened = lambda i, messages, start=start, kept=kept: self._images.messages(start + kept[i], messages)  # noqa: E731
            for i, tokens in zip(kept, tokenize_responses(self.tokenizer, *pairs, locate, opened), strict=True):
                found[start + i] = tokens
                self._images.check(start + i, [*tokens[0], *tokens[1]], tokens[1])
        return found

    def _select_rows(self) -> list[int]:
        limit, total = self.config.max_length, self._num_rows
        lengths = [
            max(sum(map(len, tokens[row])) for tokens in self._responses) + self._images.more_tokens(row)
            for row in range(total)
        ]
        too_long = [row for row in range(total) if lengths[row] > limit]
        if too_long and self.config.truncation == "error":
            what, way_out = "a prompt with its response", "leave such rows out with data.truncation=filter"
            raise overlong_error(lengths, limit, self._rows.location, what=what, key="data.max_length", way_out=way_out)
        if too_long:
            logger.info("left out %d of %d rows, which are longer than data.max_length=%d", len(too_long), total, limit)
        selected = [row for row in range(total) if lengths[row] <= limit and row not in self._blank]
        self._rows.require_left(selected, what="rows", num_rows=total, limit=f"data.max_length={limit}")
        return selected


class PairDataset(PreferenceDataset):
    """Pairs of a preferred and a rejected response, optionally with a margin. Arguments as for `PreferenceDataset`."""

    def response_settings(self) -> tuple[str, ...]:
        return ("chosen_key", "rejected_key")

    def column_settings(self) -> tuple[str, ...]:
        """Return all settings that name columns, with the margin's if there is one."""
        return (*super().column_settings(), *(["margin_key"] if self._margin_key else []))

    @property
    def _margin_key(self) -> str | None:
        return getattr(self.config, "margin_key", None)

    def _check(self) -> None:
        self.check_pairs()
        self._margins = (
            [self._margin(row, value) for row, value in self.column("margin_key")] if self._margin_key else []
        )

    def _margin(self, row: int, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(row, f"{self._margin_key}={value!r} is not a margin; give a finite number")
        return float(value)

    def __getitem__(self, position: int) -> dict:
        """Return the two sequences, chosen first, and `margin` if the data have one."""
        margin = {"margin": self._margins[self._selected_rows[position]]} if self._margin_key else {}
        return super().__getitem__(position) | margin

    def collate(self, rows: list[dict]) -> DataProto:
        """Return a batch (B = 2N): the columns of `collate_sequences`, `pair`, `preferred` and, if given, `margin`.

        `pair` (B,) int64 is the number of a pair in the batch. `preferred` (B,) int64 is 1 for the chosen response.
        """
        batch = super().collate(rows)
        batch.batch["pair"] = torch.arange(len(rows)).repeat_interleave(2)
        batch.batch["preferred"] = torch.tensor([1, 0]).repeat(len(rows))
        if self._margin_key:
            batch.batch["margin"] = torch.tensor([row["margin"] for row in rows]).repeat_interleave(2)
        return batch


class LabelDataset(PreferenceDataset):
    """Single responses with a label, desirable or not. Arguments as for `PreferenceDataset`.

    Files of pairs without a column of labels are read too: the chosen responses of all pairs, which are desirable, and
    after them the rejected ones, so that rows of one prompt are not adjacent.
    """

    config: DPODataConfig

    @property
    def has_pairs(self) -> bool:
        """Whether the files have pairs in place of labels."""
        pair = self._rows.has(self.config.chosen_key) and self._rows.has(self.config.rejected_key)
        return pair and not self._rows.has(self.config.label_key)

    def response_settings(self) -> tuple[str, ...]:
        return ("chosen_key", "rejected_key") if self.has_pairs else ("completion_key",)

    def column_settings(self) -> tuple[str, ...]:
        """Return all settings that name columns, the label first."""
        return (*(() if self.has_pairs else ("label_key",)), *super().column_settings())

    def _check(self) -> None:
        if self.has_pairs:
            self.check_pairs()
            return
        self._labels = [self._label(row, value) for row, value in self.column("label_key")]
        if len(set(self._labels)) == 1:
            logger.warning(
                "all %d rows have the same value in %s: the loss cannot tell desirable from undesirable responses",
                len(self._labels),
                self.config.label_key,
            )

    def _label(self, row: int, value: Any) -> int:
        if value not in (0, 1):  # True and False are
            raise self.error(row, f"{self.config.label_key}={value!r} is not a label; give true or false, or 1 or 0")
        return int(value)

    def __getitem__(self, position: int) -> dict:
        """Return the sequence, and `label`: 1 if it is desirable, else 0."""
        kind, place = divmod(position, len(self._selected_rows))
        row = self._selected_rows[place]
        label = 1 - kind if self.has_pairs else self._labels[row]
        return {"sequences": self._sequences(row, [self._responses[kind]]), "label": label}

    def __len__(self) -> int:
        return len(self._selected_rows) * len(self._responses)

    def collate(self, rows: list[dict]) -> DataProto:
        """Return a batch (B = N): the columns of `collate_sequences`, and the labels as `preferred` (B,) int64."""
        batch = super().collate(rows)
        batch.batch["preferred"] = torch.tensor([row["label"] for row in rows])
        return batch


def is_blank(response: Any) -> bool:
    """Return whether a response, text or messages, has nothing but white space at its end."""
    if isinstance(response, list) and response and isinstance(response[-1], Mapping):
        response = response[-1].get("content")
    return isinstance(response, str) and not response.strip()


def tokenize_responses(
    tokenizer: Any,
    prompts: list,
    responses: list,
    locate: Locate,
    opened: Callable[[int, list[dict]], list[dict]] = lambda row, messages: messages,
) -> list[Tokens]:
    """Return the tokens of every prompt, and of its response with the end-of-turn or end-of-sequence token.

    Args:
        opened: Returns the messages of a prompt, by its position, as the chat template reads them.

    Raises:
        DataError: A row has no prompt or no response, or the tokens of a prompt are not a prefix of the
            conversation's.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not has_template and all(isinstance(text, str) for text in [*prompts, *responses]):
        pairs = _tokenize_text(tokenizer, prompts, responses)
    else:
        pairs = _tokenize_messages(tokenizer, prompts, responses, locate, opened)
    for i, (prompt, response) in enumerate(pairs):
        if not prompt or not response:
            raise DataError(f"{locate(i)}: {'a response' if prompt else 'a prompt'} has no tokens; remove the row")
    return [(np.array(prompt, dtype=np.int32), np.array(response, dtype=np.int32)) for prompt, response in pairs]


def _tokenize_text(tokenizer: Any, prompts: list[str], responses: list[str]) -> list[tuple[list[int], list[int]]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    before = tokenizer(prompts)["input_ids"]
    after = tokenizer(responses, add_special_tokens=False)["input_ids"]
    return [(prompt, response + end) for prompt, response in zip(before, after, strict=True)]


def _tokenize_messages(
    tokenizer: Any, prompts: list, responses: list, locate: Locate, opened: Callable[[int, list[dict]], list[dict]]
) -> list[tuple[list[int], list[int]]]:
    own = [as_messages(prompt, locate(i)) for i, prompt in enumerate(prompts)]
    openings = [opened(i, opening) for i, opening in enumerate(own)]
    answers = [_answer(opening, responses[i], locate(i)) for i, opening in enumerate(own)]
    whole = [[*opening, *answer] for opening, answer in zip(openings, answers, strict=True)]
    before = render(tokenizer, openings, locate, add_generation_prompt=True)["input_ids"]
    found = []
    for i, (head, tokens) in enumerate(zip(before, render(tokenizer, whole, locate)["input_ids"], strict=True)):
        if tokens[: len(head)] != head:
            raise DataError(
                f"{locate(i)}: the tokens of the prompt are not a prefix of the whole conversation's, so the response "
                "cannot be found; the chat template rewrites earlier turns, or the tokenizer merges across turns"
            )
        found.append((head, tokens[len(head) : end_of_turn(tokens, len(head), tokenizer.eos_token_id)]))
    return found


def _answer(opening: list[dict], response: Any, location: str) -> list[dict]:
    """Return the messages of a response, which may repeat the prompt, or be text."""
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    messages = check_messages(response, location)
    answer = messages[len(opening) :] if messages[: len(opening)] == opening else messages
    if not answer or answer[-1]["role"] != "assistant":
        raise DataError(f"{location}: a response must end with a message of the assistant")
    return answer


def _sequence(prompt: np.ndarray, response: np.ndarray) -> dict:
    """Return `input_ids` and `loss_mask`, both (length,) int64; the mask is 1 on the response."""
    mask = np.concatenate([np.zeros(len(prompt), dtype=np.int64), np.ones(len(response), dtype=np.int64)])
    ids = np.concatenate([prompt, response]).astype(np.int64)
    return {"input_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(mask)}
