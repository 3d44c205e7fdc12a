"""Prompts for reinforcement learning: parquet rows to tokens, rows to a batch.

The order of rows and its resumable place are in `prompt_loader`; conversations for supervised fine-tuning are in
`sft_data`. Letters: B rows, P tokens of the batch's longest prompt.

The data of a PPO run: what `config.data` names, unless the caller brings datasets of its own.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridrl.config.import_path import load_object
from hybridrl.config.schema.data import DataConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.chat_template import TOKENIZE_ROWS, check_messages, render, truncate
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_loader import EpochSampler, PromptLoader

__all__ = ["EpochSampler", "PromptLoader", "RLHFDataset", "collate_fn", "load_dataset"]

logger = logging.getLogger(__name__)


class RLHFDataset:
    """The prompts of parquet files, tokenized once when the dataset is made, so that a prompt that cannot be used is
    found before the run.

    Args:
        data_files: Parquet files; one path or a list.
        tokenizer: A Hugging Face tokenizer.
        config: Which column, which limit, what to do with longer prompts.
        max_samples: Use only the first rows; -1 means all.

    Raises:
        DataError: A file or column is missing, a row is not a prompt, a row has images, a prompt is too long and
        `data.truncation=error`,
            or nothing is left.
    """

    def __init__(self, data_files: list[str] | str, tokenizer: Any, config: DataConfig, *, max_samples: int = -1):
        self.tokenizer, self.config = tokenizer, config
        self._rows = ParquetRows(data_files)
        self._rows.require(config.prompt_key, "data.prompt_key")
        self._refuse_images()
        num_rows = len(self._rows) if max_samples < 0 else min(max_samples, len(self._rows))
        self._tokens = self._tokenize(num_rows)
        self._kept = self._fitting_rows()
        if not self._kept:
            way_out = f"raise data.max_prompt_length={config.max_prompt_length}" if num_rows else "give files with rows"
            raise DataError(f"no prompts are left of {num_rows} rows in {', '.join(self._rows.files)}; {way_out}")

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> dict:
        """Return one prompt: `input_ids` (its tokens, int64, not padded) and the non-tensor columns of
        a prompt batch.
        """
        row = self._kept[position]
        columns = self._rows[row]
        extra_info = columns.get("extra_info") or {}
        tokens = truncate(self._tokens[row], self.config.max_prompt_length, self.config.truncation)
        return {
            "input_ids": torch.from_numpy(tokens.astype(np.int64)),
            "raw_prompt_ids": tokens.tolist(),
            "raw_prompt": as_messages(columns[self.config.prompt_key], self._rows.place(row)),
            "data_source": columns.get("data_source") or "unknown",
            "reward_model": columns.get("reward_model") or {"ground_truth": None},
            "ability": columns.get("ability") or "",
            "extra_info": extra_info,
            "index": row if extra_info.get("index") is None else extra_info["index"],
            "uid": str(row),
            **({"agent_name": columns["agent_name"]} if "agent_name" in columns else {}),
        }

    def _refuse_images(self) -> None:
        row = self._rows.first_filled(self.config.image_key)
        if row is not None:
            key = self.config.image_key
            raise DataError(
                f"{self._rows.place(row)} has images in column {key!r} (data.image_key); this release reads text only"
            )

    def _tokenize(self, num_rows: int) -> list[np.ndarray]:
        """Return the untruncated tokens of the first rows, each (length,) int32."""
        tokens: list[np.ndarray] = []
        for start, prompts in self._rows.values(self.config.prompt_key, batch=TOKENIZE_ROWS, limit=num_rows):
            tokens.extend(np.array(ids, dtype=np.int32) for ids in self._tokenize_some(start, prompts))
        return tokens

    def _tokenize_some(self, start: int, prompts: list) -> list[list[int]]:
        if not getattr(self.tokenizer, "chat_template", None) and all(
            isinstance(prompt, str) and prompt for prompt in prompts
        ):
            return self.tokenizer(prompts)["input_ids"]
        conversations = [as_messages(prompt, self._rows.place(start + i)) for i, prompt in enumerate(prompts)]
        place = lambda i: self._rows.place(start + i)  # noqa: E731
        rendered = render(
            self.tokenizer, conversations, place, add_generation_prompt=True, **self.config.apply_chat_template_kwargs
        )
        return rendered["input_ids"]

    def _fitting_rows(self) -> list[int]:
        limit = self.config.max_prompt_length
        too_long = [row for row, tokens in enumerate(self._tokens) if len(tokens) > limit]
        if self.config.filter_overlong_prompts:
            dropped, total = set(too_long), len(self._tokens)
            logger.info(
                "%d of %d prompts are longer than data.max_prompt_length=%d and are left out",
                len(dropped),
                total,
                limit,
            )
            return [row for row in range(total) if row not in dropped]
        if too_long and self.config.truncation == "error":
            self._refuse_overlong(too_long)
        return list(range(len(self._tokens)))

    def _refuse_overlong(self, rows: list[int]) -> None:
        limit, first, longest = self.config.max_prompt_length, rows[0], max(len(self._tokens[row]) for row in rows)
        raise DataError(
            f"{self._rows.place(first)}: a prompt of {len(self._tokens[first])} tokens is longer than "
            f"data.max_prompt_length={limit}"
            f" ({len(rows)} of {len(self._tokens)} are, the longest has {longest});"
            " raise data.max_prompt_length, or set data.filter_overlong_prompts=true, or data.truncation "
            "to left, right or middle"
        )


def as_messages(prompt: Any, place: str) -> list[dict]:
    """Return a prompt as chat messages; a string is what a user says."""
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    return check_messages(prompt, place)


def collate_fn(rows: list[dict], pad_token_id: int) -> DataProto:
    """Return a batch of rows as `RLHFDataset` gives them.

    `input_ids`, `attention_mask`, `position_ids` are (B, P) int64, padded on the left; a token's position counts from
    the first real one. Everything else in a row becomes an object array (B,).
    """
    width = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        start = width - len(row["input_ids"])
        input_ids[i, start:] = row["input_ids"]
        attention_mask[i, start:] = 1
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    names = dict.fromkeys(name for row in rows for name in row if name != "input_ids")
    return DataProto.from_dict(tensors, {name: object_array([row.get(name) for row in rows]) for name in names})


def object_array(values: list) -> np.ndarray:
    """Return (B,) objects, also where the values are lists of equal length, which numpy would make a matrix of."""
    return np.fromiter(values, dtype=object, count=len(values))


def load_dataset(config: DataConfig, files: list[str] | str, tokenizer: Any, *, max_samples: int = -1) -> Any:
    """Return the dataset over `files`: an `RLHFDataset`, or the class that `data.custom_cls` names, made with the same
    arguments.

    Raises:
        ConfigError: The custom class cannot be found, or is no dataset (`__len__` and `__getitem__`).
    """
    custom = config.custom_cls
    if custom.path is None and custom.name is None:
        return RLHFDataset(files, tokenizer, config, max_samples=max_samples)
    if custom.path is None or custom.name is None:
        raise ConfigError(
            f"data.custom_cls.path={custom.path} and data.custom_cls.name={custom.name} go together; set both or none"
        )
    cls = load_object(custom.path, custom.name)
    if not (isinstance(cls, type) and hasattr(cls, "__len__") and hasattr(cls, "__getitem__")):
        raise ConfigError(
            f"data.custom_cls: {custom.name} in {custom.path} is not a class with __len__ and __getitem__"
        )
    return cls(files, tokenizer, config, max_samples=max_samples)


def open_data(
    data: DataConfig, tokenizer: Any, train: Any, val: Any, collate: Callable, sampler: Any
) -> tuple[PromptLoader, Any]:
    """Return the loader of training prompts, and the validation set or None.

    train, val, sampler: None takes what the settings name.
    """
    train = load_dataset(data, data.train_files, tokenizer) if train is None else train
    if val is None and data.val_files:
        val = load_dataset(data, data.val_files, tokenizer, max_samples=data.val_max_samples)
    loader = PromptLoader(
        train, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed, collate=collate, sampler=sampler
    )
    return loader, val
