"""Write rollouts as JSON lines for people: prompt, response, score, and the reward function's extra values.

Also a few examples of every validation, of the same problems each time, to compare answers over the run
(`examples.jsonl` in the run's directory). Used by the trainer, validation and the report, in the driver.
"""

import base64
import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.algos.partition.row_images import IMAGE_DATA
from hybridrl.driver.terminal import printable
from hybridrl.protocol import DataProto
from hybridrl.system.atomic_write import atomic_write
from hybridrl.workers import images as row_images

logger = logging.getLogger(__name__)
EXAMPLES_FILE = "examples.jsonl"
MAX_EXAMPLES = 3  # data sources with one example each
KEPT_FOLDER = "rollouts"  # in the run's directory
KEPT_STEPS, KEPT_EVERY = 200, 20
MAX_SHOWN = 240  # characters of a prompt or response; longer ones are cut in the middle
Example = Mapping[str, Any]  # of EXAMPLE_KEYS; score is None if it was not scored
EXAMPLE_KEYS = {"step", "data_source", "question", "response", "ground_truth", "score"}


def sample_rows(batch: DataProto, tokenizer, *, step: int, extra: dict[str, list]) -> Iterator[dict[str, Any]]:
    """Yield one record per row of a scored batch.

    The score of a row that could not be scored is None.
    """
    width = batch.batch["prompts"].size(1)
    is_token = batch.batch["attention_mask"].bool()
    prompts = tokenizer.batch_decode(_ids(batch.batch["prompts"], is_token[:, :width]), skip_special_tokens=True)
    # Includes tool output inside a response, where response_mask is 0.
    responses = tokenizer.batch_decode(_ids(batch.batch["responses"], is_token[:, width:]), skip_special_tokens=True)
    scores, valid = batch.batch["token_level_scores"].sum(-1).tolist(), batch.batch["reward_valid"].tolist()
    truths = [
        r.get("ground_truth") if isinstance(r, dict) else None
        for r in batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    ]
    ids, versions = sample_ids(batch), batch.batch.get("weights_version")
    images = small_copies(batch)
    for i, score in enumerate(scores):
        record = {"step": step, "id": ids[i], "input": prompts[i], "output": responses[i], "gts": truths[i]}
        record |= {"score": score if valid[i] else None} | ({} if versions is None else {"version": int(versions[i])})
        record |= {"images": images[i]} if i in images else {}
        yield record | {k: v[i] for k, v in extra.items()}


def small_copies(batch: DataProto) -> dict[int, list[str]]:
    """Return row -> small copies of its prompt's images as data URIs, if it has any.

    The samples of a prompt share them.
    """
    found: dict[int, list[str]] = {}
    of_prompt: dict[int, list[str]] = {}
    for row, data in enumerate(batch.non_tensor_batch.get(IMAGE_DATA, ())):
        if data is not None:
            if id(data) not in of_prompt:
                of_prompt[id(data)] = [_data_uri(row_images.small_copy(image)) for image in data["images"]]
            found[row] = of_prompt[id(data)]
    return found


def _data_uri(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def sample_ids(batch: DataProto) -> list[str]:
    """Return an id for each row: its prompt's `uid` and a checksum of its response, equal for equal responses."""
    uids = batch.non_tensor_batch.get("uid", range(len(batch)))
    responses = batch.batch["responses"].to(torch.int64).cpu().numpy()
    return [f"{uid}:{zlib.crc32(row.tobytes()):08x}" for uid, row in zip(uids, responses, strict=True)]


def _ids(tokens: torch.Tensor, is_token: torch.Tensor) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(tokens, is_token, strict=True)]


def write_samples(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write records as JSON lines to a file that appears complete or not at all.

    Training does not depend on it: what the storage does not take is logged.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with atomic_write(path) as f:
            for row in rows:
                f.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
    except OSError as error:
        logger.warning("the samples of %s were not written: %s; training continues", path, error)


def keep_samples(directory: str, batch: DataProto, tokenizer: Any, *, step: int, extra: dict[str, list]) -> None:
    """Write a few samples of a step to the run's directory, where `hybridrl view` and people look for them.

    The best and the worst one, and the first ones of two prompts. Of the last `KEPT_STEPS` steps, and of every
    `KEPT_EVERY`-th of those before, so that a long run needs little space.
    """
    folder = os.path.join(directory, KEPT_FOLDER)
    if step == 1:
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's
    rows = _kept_rows(batch)
    few = {name: [column[row] for row in rows] for name, column in extra.items()}
    records = sample_rows(batch.select_idxs(rows), tokenizer, step=step, extra=few)
    write_samples(os.path.join(folder, f"{step}.jsonl"), records)
    old = step - KEPT_STEPS
    if old > 0 and old % KEPT_EVERY:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, f"{old}.jsonl"))


def _kept_rows(batch: DataProto) -> list[int]:
    scores = batch.batch["token_level_scores"].sum(-1)
    prompts = batch.non_tensor_batch.get("uid", np.arange(len(batch)))
    first = np.sort(np.unique(prompts, return_index=True)[1])[:2]
    return sorted({*first.tolist(), int(scores.argmax()), int(scores.argmin())})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def first_examples(batch: DataProto, records: Sequence[Mapping[str, Any]]) -> Iterator[Example]:
    """Yield the first row of each data source in a scored batch; `records` are the batch's `sample_rows`."""
    sources = batch.non_tensor_batch["data_source"].tolist()
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
            "score": record["score"],
        }


def save_examples(directory: str, examples: Sequence[Example], *, step: int) -> None:
    """Append a validation's examples to the run's file.

    Drops examples of this step and later ones: they are of a killed or finished run.
    """
    earlier = [example for example in read_examples(directory) if example["step"] < step]
    write_samples(os.path.join(directory, EXAMPLES_FILE), [*earlier, *examples])


def read_examples(directory: str | Path) -> list[Example]:
    """Return the examples of the run that wrote to `directory`, by step; damaged lines are left out."""
    path = Path(directory) / EXAMPLES_FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [example for line in lines if (example := _example(line)) is not None]


def _example(line: str) -> Example | None:
    try:
        found = json.loads(line)
        return found if found.keys() >= EXAMPLE_KEYS and isinstance(found["step"], int) else None
    except (ValueError, AttributeError, RecursionError):
        return None


def format_prompt(example: Example) -> str:
    """Return one line with the problem and its ground truth."""
    truth = "" if example["ground_truth"] is None else f"  [{_short(str(example['ground_truth']))}]"
    return f"asked ({_short(str(example['data_source']))}): {_short(str(example['question']))}{truth}"


def format_answer(example: Example) -> str:
    """Return one line with step, score and response."""
    score = "not scored" if example["score"] is None else f"score {example['score']:g}"
    return f"step {example['step']} answered, {score}: {_short(example['response']) or '(nothing)'}"


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN // 2]} ... {line[-MAX_SHOWN // 2 :]}"
