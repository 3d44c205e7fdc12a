"""Samples that a run keeps: which ones, and for how long."""

import json

import numpy as np
import torch

from hybridrl.protocol import DataProto
from hybridrl.trainer.run.samples import KEPT_EVERY, KEPT_STEPS, keep_samples
from tests.support.trainer.letter_tokenizer import letter_tokenizer

SCORES = [0.5, 0.4, 0.6, 0.1, 0.9, 0.3]  # of three prompts, two samples each


def batch() -> DataProto:
    num = len(SCORES)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.full((num, 2), 5),
            "responses": torch.arange(num)[:, None] + 5,
            "attention_mask": torch.ones(num, 3, dtype=torch.int64),
            "token_level_scores": torch.tensor(SCORES)[:, None],
            "reward_valid": torch.arange(num) != 2,
        },
        non_tensors={"uid": np.array([str(row // 2) for row in range(num)], dtype=object)},
    )


def keep(folder, step: int) -> list[dict]:
    keep_samples(str(folder), batch(), letter_tokenizer(), step=step, extra={"acc": [int(s > 0.5) for s in SCORES]})
    return [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]


def test_the_best_the_worst_and_the_first_of_two_prompts_are_kept_with_what_the_reward_returned(tmp_path):
    kept = keep(tmp_path, 1)
    assert [one["score"] and round(one["score"], 3) for one in kept] == [0.5, None, 0.1, 0.9]
    assert [one["acc"] for one in kept] == [0, 1, 0, 1]


def test_of_old_steps_every_twentieth_stays_and_a_new_run_begins_without_them(tmp_path):
    for step in range(1, KEPT_STEPS + 2 * KEPT_EVERY + 1):
        keep(tmp_path, step)
    left = sorted(int(path.stem) for path in (tmp_path / "rollouts").iterdir())
    last = KEPT_STEPS + 2 * KEPT_EVERY
    assert left == [KEPT_EVERY, *range(2 * KEPT_EVERY, last + 1)]
    keep(tmp_path, 1)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["1.jsonl"]
