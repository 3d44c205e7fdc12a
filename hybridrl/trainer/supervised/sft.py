"""`SFTTrainer`: the driver of supervised fine-tuning, as a list of stages, and its dataset.

    next_batch -> update -> validate -> log -> save_checkpoint

`main_sft` creates it. What it shares with other trainers of one model is in `supervised_trainer.py`. `SFTDataset` has
tokenized conversations with a loss mask over the assistant's tokens. The mask comes from the chat template's generation
markers, or from templating the conversation turn by turn.
"""

import logging
import math
import re
from collections.abc import Callable, Collection
from itertools import compress
from typing import Any

import numpy as np
import torch

from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.config.schema.sft import SFTConfig, SFTDataConfig
from hybridrl.errors import DataError
from hybridrl.framework.stage import Stage
from hybridrl.protocol import DataProto
from hybridrl.trainer import data as data_room
from hybridrl.trainer.data.chat_template import TOKENIZE_ROWS, check_messages, overlong_error, render, truncate
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_loader import PromptLoader
from hybridrl.trainer.data.sequences import collate_sequences, end_of_turn
from hybridrl.trainer.data.tokenizer import pad_token_id
from hybridrl.trainer.supervised.supervised_trainer import MODEL_INPUT, SupervisedTrainer
from hybridrl.workers import images

logger = logging.getLogger(__name__)
ROLE = "sft"
Locate = Callable[[int], str]  # position of a conversation -> its file and row, for errors
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SFTDataset:
    """Conversations of parquet files, tokenized at construction, with a loss mask.

    Args:
        data_files: Parquet files; one path or a list.
        tokenizer: A Hugging Face tokenizer with a chat template.
        config: Settings `data`: column, length limit, truncation.
        max_samples: Use only the first rows; -1 means all.
        processor: Of a model that reads images, see `workers/images`.

    Raises:
        DataError: A file or column is missing. A row is no conversation or has no assistant message. The assistant's
            tokens cannot be separated from the template's. A conversation is too long with `data.truncation=error`. No
            conversation is left.
    """

    def __init__(
        self,
        data_files: list[str] | str,
        tokenizer: Any,
        config: SFTDataConfig,
        *,
        max_samples: int = -1,
        processor: Any = None,
    ):
        self.tokenizer, self.config = tokenizer, config
        self._rows = ParquetRows(data_files)
        self._images = data_room.ImageColumn(self._rows, config.image_key, processor)
        num_rows = len(self._rows) if max_samples < 0 else min(max_samples, len(self._rows))
        self._rows.require(config.messages_key, "data.messages_key")
        self._tokens: list[np.ndarray] = []  # each (length,) int32
        self._masks: list[np.ndarray] = []  # each (length,) bool
        for start, column in self._rows.values(config.messages_key, batch=TOKENIZE_ROWS, limit=num_rows):
            self._tokenize(start, column)
        self._selected_rows = self._select_rows()
        limit, total = f"data.max_length={config.max_length}", len(self._rows)
        self._rows.require_left(self._selected_rows, what="conversations", num_rows=total, limit=limit)

    def __len__(self) -> int:
        return len(self._selected_rows)

    def __getitem__(self, position: int) -> dict:
        """Return `input_ids` and `loss_mask`, both (length,) int64, and the columns of a row with images.

        The mask is 1 on the assistant's tokens, including its end-of-turn token.
        """
        row = self._selected_rows[position]
        tokens, columns = self._images.inputs(row, self._tokens[row])
        mask = self._masks[row]
        if columns:
            mask = images.expanded(mask, columns[IMAGE_INPUTS])
        return {"input_ids": self._cut(tokens), "loss_mask": self._cut(mask), **columns}

    def collate(self, rows: list[dict]) -> DataProto:
        """Return `collate_sequences` of the rows, padded with the tokenizer's padding or end-of-sequence token."""
        return collate_sequences(rows, pad_token_id(self.tokenizer))

    def _cut(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(truncate(values, self.config.max_length, self.config.truncation).astype(np.int64))

    def _tokenize(self, start: int, column: list) -> None:
        rows = range(start, start + len(column))
        conversations = [
            self._images.messages(row, check_messages(value, self._rows.location(row)))
            for row, value in zip(rows, column, strict=True)
        ]
        locate = lambda i: self._rows.location(start + i)  # noqa: E731
        has_markers = GENERATION_MARKER.search(getattr(self.tokenizer, "chat_template", None) or "")
        tokens, masks = (assistant_mask_from_markers if has_markers else mask_by_turns)(
            self.tokenizer, conversations, locate
        )
        for i, mask in enumerate(masks):
            if not any(mask):
                raise DataError(f"{locate(i)}: this conversation has no assistant tokens; remove or complete the row")
            self._images.check(start + i, tokens[i], compress(tokens[i], mask))
        self._tokens.extend(np.array(ids, dtype=np.int32) for ids in tokens)
        self._masks.extend(np.array(mask, dtype=bool) for mask in masks)

    def _select_rows(self) -> list[int]:
        limit, truncation = self.config.max_length, self.config.truncation
        lengths = [len(tokens) + self._images.more_tokens(row) for row, tokens in enumerate(self._tokens)]
        too_long = [row for row, length in enumerate(lengths) if length > limit]
        if too_long and truncation == "error":
            way_out = "set data.truncation to left, right or filter"
            raise overlong_error(
                lengths, limit, self._rows.location, what="a conversation", key="data.max_length", way_out=way_out
            )
        if truncation == "filter":
            dropped, total = set(too_long), len(self._tokens)
            logger.info(
                "left out %d of %d conversations, which are longer than data.max_length=%d", len(dropped), total, limit
            )
            return [row for row in range(total) if row not in dropped]
        for row in self._images.rows_with_images() & set(too_long):
            data_room.check_tokens(lengths[row], limit, self._rows.location(row), key="data.max_length")
        num_untrained = sum(not truncate(self._masks[row], limit, truncation).any() for row in too_long)
        if num_untrained:
            logger.warning(
                "%d of %d conversations keep no assistant token within data.max_length=%d and train nothing; raise the "
                "limit, or set data.truncation",
                num_untrained,
                len(self._tokens),
                limit,
            )
        return list(range(len(self._tokens)))


def assistant_mask_from_markers(
    tokenizer: Any, conversations: list[list[dict]], locate: Locate
) -> tuple[list[list[int]], list[list[int]]]:
    """Return tokens and masks of conversations by the template's `{% generation %}` markers."""
    rendered = render(tokenizer, conversations, locate, return_assistant_tokens_mask=True)
    return rendered["input_ids"], rendered["assistant_masks"]


def mask_by_turns(
    tokenizer: Any, conversations: list[list[dict]], locate: Locate
) -> tuple[list[list[int]], list[list[int]]]:
    """Return tokens and masks of conversations by templating prefixes.

    Each conversation is templated up to every assistant turn, without and with that turn. The difference is the
    assistant's.

    Raises:
        DataError: A prefix's tokens are not a prefix of the conversation's tokens, because the template rewrites
            earlier turns or the tokenizer merges across turns.
    """
    whole = render(tokenizer, conversations, locate)["input_ids"]
    masks = [[0] * len(tokens) for tokens in whole]
    turns = [
        (i, k)
        for i, messages in enumerate(conversations)
        for k, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if not turns:
        return whole, masks
    locate_turn = lambda t: locate(turns[t][0])  # noqa: E731
    before = render(tokenizer, [conversations[i][:k] for i, k in turns], locate_turn, add_generation_prompt=True)[
        "input_ids"
    ]
    until = render(tokenizer, [conversations[i][: k + 1] for i, k in turns], locate_turn)["input_ids"]
    for (i, k), head, tokens in zip(turns, before, until, strict=True):
        if tokens[: len(head)] != head or whole[i][: len(tokens)] != tokens:
            raise DataError(
                f"{locate(i)} message {k}: the tokens up to this turn are not a prefix of the whole conversation's, so "
                "the assistant's tokens cannot be found; put {% generation %} and {% endgeneration %} around them in "
                "the chat template"
            )
        end = end_of_turn(tokens, len(head), tokenizer.eos_token_id)
        masks[i][len(head) : end] = [1] * (end - len(head))
    return whole, masks


class SFTTrainer(SupervisedTrainer):
    """The driver of supervised fine-tuning; arguments as for `SupervisedTrainer`."""

    role = ROLE

    def load_dataset(
        self, config: SFTConfig, files: list[str], tokenizer: object, *, max_samples: int = -1
    ) -> SFTDataset:
        """Return the tokenized conversations of `files`."""
        return SFTDataset(files, tokenizer, config.data, max_samples=max_samples, processor=self.processor)

    @classmethod
    def step(cls, config: SFTConfig, roles: Collection[str]) -> list[Stage]:
        """Return the stages of a step in order."""
        return [
            # 1. Conversations.
            Stage(cls.next_batch, writes=MODEL_INPUT, pure=False),
            # 2. One optimizer step on the assistant's tokens.
            Stage(cls.update, role=ROLE, reads=MODEL_INPUT, pure=False),
            # 3. Outputs.
            Stage(cls.validate, "testing", ROLE),
            Stage(cls.log, pure=False),
            Stage(cls.save_checkpoint, pure=False),
        ]

    def validation_metrics(self, loader: PromptLoader) -> dict[str, float]:
        """Return the mean negative log-likelihood of the assistant's tokens."""
        sums = [self.groups[ROLE].compute_loss(loader.next_batch())[0] for _ in range(loader.steps_per_epoch)]
        return {"loss": math.fsum(total for total, _ in sums) / math.fsum(count for _, count in sums)}
