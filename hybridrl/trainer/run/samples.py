"""Rollouts as people read them: one JSON line per sample, with prompt, response, score and what the reward function
added.

And a few of every validation, the same problems each time, so that one sees the answers change: `examples.jsonl` in the
run's directory.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.protocol import DataProto

EXAMPLES_FILE = "examples.jsonl"
MAX_EXAMPLES = 3  # data sources of which one is shown
MAX_SHOWN = 240  # characters of a prompt or a response; of longer ones the beginning and the end
Example = Mapping[str, Any]  # step, data_source, question, response, ground_truth, score (None: not scored)


def sample_rows(batch: DataProto, tokenizer, *, step: int, extra: dict[str, list]) -> Iterator[dict[str, Any]]:
    """Yield one record per row of a scored batch."""
    width = batch.batch["prompts"].size(1)
    is_there = batch.batch["attention_mask"].bool()
    prompts = tokenizer.batch_decode(_ids(batch.batch["prompts"], is_there[:, :width]), skip_special_tokens=True)
    # Also what a tool said in the middle of a response, where response_mask is 0.
    responses = tokenizer.batch_decode(_ids(batch.batch["responses"], is_there[:, width:]), skip_special_tokens=True)
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    truths = [
        r.get("ground_truth") if isinstance(r, dict) else None
        for r in batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    ]
    for i, score in enumerate(scores):
        yield {"step": step, "input": prompts[i], "output": responses[i], "gts": truths[i], "score": score} | {
            k: v[i] for k, v in extra.items()
        }


def _ids(tokens: torch.Tensor, is_there: torch.Tensor) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(tokens, is_there, strict=True)]


def write_samples(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write the records as JSON lines to a file that appears complete or not at all."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    aside = f"{path}.partial"
    with open(aside, "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
    os.replace(aside, path)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def first_examples(batch: DataProto, records: Sequence[Mapping[str, Any]]) -> Iterator[Example]:
    """Yield one example for each data source of a scored batch, its first row. records: the batch's `sample_rows`."""
    sources, valid = batch.non_tensor_batch["data_source"].tolist(), batch.batch["reward_valid"].tolist()
    chats = batch.non_tensor_batch.get("raw_prompt", [None] * len(batch))
    for source in dict.fromkeys(sources):
        i = sources.index(source)
        record = records[i]
        yield {
            "step": record["step"],
            "data_source": source,
            "question": record["input"] if chats[i] is None else chats[i][-1]["content"],
            "response": record["output"],
            "ground_truth": record["gts"],
            "score": record["score"] if valid[i] else None,
        }


def keep_examples(directory: str, examples: Sequence[Example], *, step: int) -> None:
    """Add the examples of a validation to the run's; those of this step and later ones are of a run that was killed or
    is over.
    """
    earlier = [example for example in read_examples(directory) if example["step"] < step]
    write_samples(os.path.join(directory, EXAMPLES_FILE), [*earlier, *examples])


def read_examples(directory: str | Path) -> list[dict[str, Any]]:
    """Return the examples of the run that wrote to `directory`, in the order of their steps."""
    path = Path(directory) / EXAMPLES_FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def asked(example: Example) -> str:
    """Return one line about the problem."""
    truth = "" if example["ground_truth"] is None else f"  [{_short(str(example['ground_truth']))}]"
    return f"asked ({example['data_source']}): {_short(str(example['question']))}{truth}"


def answered(example: Example) -> str:
    """Return one line about the response."""
    score = "not scored" if example["score"] is None else f"score {example['score']:g}"
    return f"step {example['step']} answered, {score}: {_short(example['response']) or '(nothing)'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN // 2]} ... {line[-MAX_SHOWN // 2 :]}"
