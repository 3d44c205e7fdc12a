"""A loader of prompts of one token: their row number."""

import torch

from hybridrl.trainer.data.prompt_dataset import collate_fn
from hybridrl.trainer.data.prompt_loader import PromptLoader


class NumberedPrompts:
    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict:
        return {"input_ids": torch.tensor([row])}


def numbered_loader(rows: int, *, size: int) -> PromptLoader:
    """Return a loader of batches of `size` prompts, in another order in each epoch."""
    return PromptLoader(
        NumberedPrompts(rows),
        batch_size=size,
        shuffle=True,
        seed=3,
        collate=lambda items: collate_fn(items, pad_token_id=0),
    )
