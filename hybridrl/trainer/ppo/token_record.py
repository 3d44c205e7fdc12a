"""Record the tokens of some samples with what the update saw of each, for `hybridrl view`.

`trainer.rollout_data_dir`/tokens/{step}.jsonl has a line per sample: its id, as in the step's samples, and lists with
one entry per token of its response. Loaded by runs with that setting; called by the trainer, in the driver.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch

from hybridrl.protocol import DataProto
from hybridrl.trainer.run.samples import sample_ids, write_samples

DIRECTORY = "tokens"  # in trainer.rollout_data_dir
MAX_TOKENS = 16_384  # of a step: a megabyte of JSON
COLUMNS = {"mask": "response_mask", "rollout": "rollout_log_probs", "old": "old_log_probs", "advantage": "advantages"}
DIGITS = 4


def record_tokens(
    directory: str, batch: DataProto, tokenizer: Any, *, step: int, updated: DataProto | None = None
) -> None:
    """Write the tokens of the first samples of a batch that was trained.

    Args:
        directory: `trainer.rollout_data_dir`.
        batch: All rows of the step, with advantages.
        tokenizer: The policy's.
        step: The step.
        updated: What `update_actor` returned, if the batch has no `old_log_probs`.
    """
    columns = {name: batch.batch[column] for name, column in COLUMNS.items() if column in batch.batch.keys()}
    if "old" not in columns and updated is not None:
        columns["old"] = torch.full_like(batch.batch["advantages"], torch.nan)
        columns["old"][updated.batch["batch_row"]] = updated.batch["old_log_probs"]
    write_samples(os.path.join(directory, DIRECTORY, f"{step}.jsonl"), _records(batch, columns, tokenizer, step=step))


def _records(
    batch: DataProto, columns: dict[str, torch.Tensor], tokenizer: Any, *, step: int
) -> Iterator[dict[str, Any]]:
    responses = batch.batch["responses"]
    is_token = batch.batch["attention_mask"][:, -responses.size(1) :].bool()
    ends = is_token.sum(-1).cumsum(0)
    num_rows = max(1, int((ends <= MAX_TOKENS).sum()))
    texts: dict[int, str] = {}  # token id -> text
    for row, sample_id in enumerate(sample_ids(batch)[:num_rows]):
        keep = is_token[row]
        tokens = responses[row][keep].tolist()
        for token in tokens:
            if token not in texts:
                texts[token] = tokenizer.decode([token])
        values = {name: _rounded(column[row][keep]) for name, column in columns.items()}
        yield {"step": step, "id": sample_id, "tokens": [texts[token] for token in tokens]} | values


def _rounded(values: torch.Tensor) -> list[float | None]:
    """Return numbers with `DIGITS` digits after the point; None for nan: an update that left the row out."""
    return [None if value != value else round(value, DIGITS) for value in values.tolist()]
