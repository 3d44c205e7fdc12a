"""Rollouts as people read them: one JSON line per sample, with prompt, response, score and what the reward function added."""

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridrl.protocol import DataProto


def sample_rows(batch: DataProto, tokenizer, *, step: int, extra: dict[str, list]) -> Iterator[dict[str, Any]]:
    """Yield one record per row of a scored batch."""
    prompts = tokenizer.batch_decode(
        _ids(batch, "prompts", "attention_mask", width=batch.batch["prompts"].size(1)), skip_special_tokens=True
    )
    responses = tokenizer.batch_decode(_ids(batch, "responses", "response_mask"), skip_special_tokens=True)
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    truths = [
        r.get("ground_truth") if isinstance(r, dict) else None for r in batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    ]
    for i, score in enumerate(scores):
        yield {"step": step, "input": prompts[i], "output": responses[i], "gts": truths[i], "score": score} | {
            k: v[i] for k, v in extra.items()
        }


def _ids(batch: DataProto, column: str, mask: str, width: int | None = None) -> list[list[int]]:
    ids, keep = batch.batch[column], batch.batch[mask][:, :width].bool()
    return [row[k].tolist() for row, k in zip(ids, keep, strict=True)]


def write_samples(path: str, rows: Iterator[dict[str, Any]]) -> None:
    """Write the records as JSON lines to a file that appears complete or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aside = f"{path}.partial"
    with open(aside, "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
    os.replace(aside, path)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
