"""Prompts for reinforcement learning: parquet rows to tokens, rows to a batch.

`load_prompt_data` returns the data of a PPO run: what `config.data` names, unless the caller passes its own datasets.
Used by the PPO trainer, in the driver. The order of rows is `prompt_loader.py`'s; conversations for SFT are
`supervised/sft.py`'s.

Shape letters: B rows, P tokens of the batch's longest prompt.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema.data import DataConfig
from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.errors import ConfigError, DataError
from hybridrl.import_path import load_object
from hybridrl.protocol import DataProto
from hybridrl.trainer import data as data_room
from hybridrl.trainer.data.chat_template import (
    TOKENIZE_ROWS,
    check_messages,
    overlong_error,
    reject_json_text,
    render,
    truncate,
)
from hybridrl.trainer.data.epoch_sampler import EpochSampler
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_loader import NoPrompts, PromptLoader

__all__ = ["EpochSampler", "PromptLoader", "RLHFDataset", "collate_fn", "load_dataset"]

logger = logging.getLogger(__name__)


class RLHFDataset:
    """The prompts of parquet files, tokenized when the dataset is made.

    So a bad prompt is found before training.

    Args:
        data_files: Parquet files; one path or a list.
        tokenizer: A Hugging Face tokenizer.
        config: Which column, which limit, what to do with longer prompts.
        processor: Of the model, see `workers/images`; None: the model reads text only.
        max_samples: Use only the first rows; -1 means all.

    Raises:
        DataError: A file or column is missing or has the wrong type, a row is not a prompt, an image is not one, no
            prompt is left, or a prompt is too long and `data.truncation=error`.
    """

    def __init__(
        self,
        data_files: list[str] | str,
        tokenizer: Any,
        config: DataConfig,
        processor: Any = None,
        max_samples: int = -1,
    ):
        self.tokenizer, self.config, self.processor = tokenizer, config, processor
        self._rows = ParquetRows(data_files)
        self._rows.require(config.prompt_key, "data.prompt_key")
        for column in ("reward_model", "extra_info"):
            self._rows.require_mappings(column)
        if config.ground_truth_key is not None:
            self._rows.require(config.ground_truth_key, "data.ground_truth_key")
        for column in ("data_source", "ability"):
            self._rows.require_texts(column)
        self._images = data_room.ImageColumn(self._rows, config.image_key, processor)
        num_rows = len(self._rows) if max_samples < 0 else min(max_samples, len(self._rows))
        self._reject_missing_truths(num_rows)
        self._tokens = self._tokenize(num_rows)
        self._rows_in_use = self._fitting_rows()
        limit = f"data.max_prompt_length={config.max_prompt_length}"
        self._rows.require_left(self._rows_in_use, what="prompts", num_rows=num_rows, limit=limit)

    def __len__(self) -> int:
        return len(self._rows_in_use)

    def __getitem__(self, position: int) -> dict:
        """Return one prompt: `input_ids` ((length,) int64, not padded) and the non-tensor columns of a prompt batch."""
        row = self._rows_in_use[position]
        columns = self._rows[row]
        extra_info = columns.get("extra_info") or {}
        tokens, images = self._tokens_and_images(row)
        return {
            "input_ids": torch.from_numpy(tokens.astype(np.int64)),
            "raw_prompt_ids": tokens.tolist(),
            "raw_prompt": as_messages(columns[self.config.prompt_key], self._rows.location(row)),
            "data_source": columns.get("data_source") or "unknown",
            "reward_model": self._reward_model(columns),
            "ability": columns.get("ability") or "",
            "extra_info": extra_info,
            "index": row if extra_info.get("index") is None else extra_info["index"],
            "uid": str(row),
            **({"agent_name": columns["agent_name"]} if "agent_name" in columns else {}),
            **images,
        }

    def _tokens_and_images(self, row: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Return a row's tokens and its columns of images."""
        tokens, columns = self._images.inputs(row, self._tokens[row])
        if columns:
            data_room.check_tokens(len(tokens), self.config.max_prompt_length, self._rows.location(row))
        return truncate(tokens, self.config.max_prompt_length, self.config.truncation), columns

    @property
    def has_images(self) -> bool:
        """Whether any row in use has an image."""
        return not self._images.rows_with_images().isdisjoint(self._rows_in_use)

    def _reward_model(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the reward of a row needs: its own mapping, or the column that `data.ground_truth_key` names."""
        own = columns.get("reward_model") or {"ground_truth": None}
        key = self.config.ground_truth_key
        return own if key is None else own | {"ground_truth": columns[key]}

    @property
    def has_ground_truths(self) -> bool:
        """Whether any row has a ground truth, or is scored by a reward model."""
        key = self.config.ground_truth_key
        return self._rows.first_filled(key if key is not None else "reward_model") is not None

    def _reject_missing_truths(self, num_rows: int) -> None:
        """Raise DataError for a row without a ground truth where other rows have one."""
        key = self.config.ground_truth_key
        column = "reward_model" if key is None else key
        if not self._rows.has(column):
            return
        missing = list[int]()
        for start, values in self._rows.values(column, batch=TOKENIZE_ROWS, limit=num_rows):
            for row, value in enumerate(values, start):
                truth = (value or {}).get("ground_truth") if key is None else value
                is_scored = key is None and (value or {}).get("style") == "model"
                missing += [row] if truth is None and not is_scored else []
        if 0 < len(missing) < num_rows:
            name = "reward_model.ground_truth" if key is None else f"{key} (data.ground_truth_key)"
            raise DataError(
                f"{self._rows.location(missing[0])}: {name} is null ({len(missing)} of {num_rows} rows), so the reward "
                "function cannot score it; fill it, or remove the row"
            )

    def data_sources(self) -> dict[str, str]:
        """Return data source -> file and row of its first prompt, for errors."""
        first = self._rows.first_rows("data_source") or {"unknown": 0}
        return {source: self._rows.location(row) for source, row in first.items()}

    def _tokenize(self, num_rows: int) -> list[np.ndarray]:
        """Return the untruncated tokens of the first `num_rows` rows, each (length,) int32."""
        tokens: list[np.ndarray] = []
        for start, prompts in self._rows.values(self.config.prompt_key, batch=TOKENIZE_ROWS, limit=num_rows):
            tokens.extend(np.array(ids, dtype=np.int32) for ids in self._tokenize_rows(start, prompts))
        return tokens

    def _tokenize_rows(self, start: int, prompts: list) -> list[list[int]]:
        conversations = [as_messages(prompt, self._rows.location(start + i)) for i, prompt in enumerate(prompts)]
        if self.processor is not None:
            return [self._tokenize_with_images(start + i, messages) for i, messages in enumerate(conversations)]
        if not getattr(self.tokenizer, "chat_template", None) and all(isinstance(prompt, str) for prompt in prompts):
            return self.tokenizer(prompts)["input_ids"]
        return self._render(conversations, lambda i: self._rows.location(start + i))

    def _render(self, conversations: list[list[dict]], location: Callable[[int], str]) -> list[list[int]]:
        options = self.config.apply_chat_template_kwargs
        return render(self.tokenizer, conversations, location, add_generation_prompt=True, **options)["input_ids"]

    def _tokenize_with_images(self, row: int, messages: list[dict]) -> list[int]:
        """Return the tokens of the chat template, with one placeholder per image."""
        location = self._rows.location(row)
        [tokens] = self._render([self._images.messages(row, messages)], lambda _: location)
        self._images.check(row, tokens)
        return tokens

    def _fitting_rows(self) -> list[int]:
        limit = self.config.max_prompt_length
        lengths = [len(tokens) + self._images.more_tokens(row) for row, tokens in enumerate(self._tokens)]
        too_long = [row for row, length in enumerate(lengths) if length > limit]
        if self.config.filter_overlong_prompts:
            dropped, total = set(too_long), len(self._tokens)
            logger.info(
                "%d of %d prompts are longer than data.max_prompt_length=%d and are dropped", len(dropped), total, limit
            )
            return [row for row in range(total) if row not in dropped]
        if too_long and self.config.truncation == "error":
            way_out = "set data.filter_overlong_prompts=true, or data.truncation to left, right or middle"
            raise overlong_error(
                lengths, limit, self._rows.location, what="a prompt", key="data.max_prompt_length", way_out=way_out
            )
        for row in self._images.rows_with_images() & set(too_long):
            data_room.check_tokens(lengths[row], limit, self._rows.location(row))
        return list(range(len(self._tokens)))


def as_messages(prompt: Any, location: str) -> list[dict]:
    """Return a prompt as chat messages; a string becomes one user message."""
    is_text = isinstance(prompt, str) and prompt
    if is_text:
        reject_json_text(prompt, location)
    return check_messages([{"role": "user", "content": prompt}] if is_text else prompt, location)


def collate_fn(rows: list[dict], pad_token_id: int) -> DataProto:
    """Collate rows of `RLHFDataset` into a batch.

    Args:
        rows: Items of the dataset.
        pad_token_id: Fills unused positions.

    Returns:
        `input_ids`, `attention_mask`, `position_ids`: (B, P) int64, padded on the left; positions count from the first
        real token. Every other field becomes an object array (B,).
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
    return DataProto.from_dict(tensors, {name: one_object_per_row([row.get(name) for row in rows]) for name in names})


def load_dataset(
    config: DataConfig, files: list[str] | str, tokenizer: Any, *, processor: Any = None, max_samples: int = -1
) -> Any:
    """Return the dataset over `files`: an `RLHFDataset`, or the class in `data.custom_cls` with the same arguments.

    Raises:
        ConfigError: The custom class cannot be found, or is no dataset (`__len__` and `__getitem__`).
    """
    custom = config.custom_cls
    if custom.path is None and custom.name is None:
        return RLHFDataset(files, tokenizer, config, processor, max_samples)
    if custom.path is None or custom.name is None:
        raise ConfigError(
            f"data.custom_cls.path={custom.path} and data.custom_cls.name={custom.name} go together; set both or none"
        )
    cls = load_object(custom.path, custom.name)
    if not (isinstance(cls, type) and hasattr(cls, "__len__") and hasattr(cls, "__getitem__")):
        raise ConfigError(
            f"data.custom_cls: {custom.name} in {custom.path} is not a class with __len__ and __getitem__"
        )
    what = f"{custom.name} in {custom.path}"
    return _constructed(cls, (files, tokenizer, config), processor=processor, max_samples=max_samples, what=what)


def _constructed(cls: type, arguments: tuple[Any, ...], *, processor: Any, max_samples: int, what: str) -> Any:
    """Return the dataset of a custom class; one for verl needs a processor, too, and need not take `max_samples`."""
    parameters = inspect.signature(cls).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given: dict[str, Any] = {"processor": processor} if "processor" in parameters else {}
    if takes_all or "max_samples" in parameters or max_samples >= 0:
        given["max_samples"] = max_samples
    try:
        inspect.signature(cls).bind(*arguments, **given)
    except TypeError as error:
        raise ConfigError(
            f"data.custom_cls: {what} does not take what it gets ({error}); define "
            "__init__(self, data_files, tokenizer, config, *, max_samples=-1)"
        ) from error
    return cls(*arguments, **given)


def load_sampler(config: DataConfig, dataset: Any) -> Any:
    """Return the sampler in `data.sampler`, or None if there is none.

    Raises:
        ConfigError: The class cannot be found, or is no sampler of a position that can be saved.
    """
    path, name = config.sampler.class_path, config.sampler.class_name
    if path is None and name is None:
        return None
    if path is None or name is None:
        raise ConfigError(
            f"data.sampler.class_path={path} and data.sampler.class_name={name} go together; set both or none"
        )
    cls = load_object(path, name)
    required = ("__iter__", "state_dict", "load_state_dict")
    if absent := [method for method in required if not hasattr(cls, method)]:
        raise ConfigError(
            f"data.sampler: {name} in {path} has no {', '.join(absent)}; a sampler needs {', '.join(required)}, so "
            "that a resumed run continues with the same prompts"
        )
    return cls(data_source=dataset, data_config=config)


def load_prompt_data(
    data: DataConfig, tokenizer: Any, train: Any, val: Any, collate: Callable, sampler: Any, *, processor: Any = None
) -> tuple[PromptLoader | NoPrompts, Any]:
    """Return the loader of training prompts, and the validation set or None.

    Without training files, as trainer.val_only allows, nothing can be drawn from the loader.

    Args:
        train, val, sampler: None takes what the settings name.
        collate: Rows to a `DataProto`.
        processor: Of a model that reads images.
    """
    if train is None and data.train_files:
        train = load_dataset(data, data.train_files, tokenizer, processor=processor, max_samples=data.train_max_samples)
    if val is None and data.val_files:
        val = load_dataset(data, data.val_files, tokenizer, processor=processor, max_samples=data.val_max_samples)
    if train is None:
        return NoPrompts(), val
    sampler = load_sampler(data, train) if sampler is None else sampler
    size = data.gen_batch_size or data.train_batch_size
    loader = PromptLoader(
        train, batch_size=size, shuffle=data.shuffle, seed=data.seed, collate=collate, sampler=sampler
    )
    return loader, val
