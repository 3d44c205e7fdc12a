"""The data of a PPO run: what `config.data` names, unless the caller brings datasets of its own."""

from collections.abc import Callable
from typing import Any

from hybridrl.config.data import DataConfig
from hybridrl.trainer.data import load_dataset
from hybridrl.trainer.prompt_loader import PromptLoader


def open_data(data: DataConfig, tokenizer: Any, train: Any, val: Any, collate: Callable, sampler: Any) -> tuple[PromptLoader, Any]:
    """Return the loader of training prompts, and the validation set or None. train, val, sampler: None takes what the settings name."""
    train = load_dataset(data, data.train_files, tokenizer) if train is None else train
    if val is None and data.val_files:
        val = load_dataset(data, data.val_files, tokenizer, max_samples=data.val_max_samples)
    loader = PromptLoader(train, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed, collate=collate, sampler=sampler)
    return loader, val
