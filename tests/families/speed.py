"""Measure tokens per CPU second of every family's update. Not a test file.

`python -m tests.families --speed` writes the results to speed.json, from which the page is printed.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from hybridrl.protocol import DataProto
from tests.families.configurations import FAMILIES, VOCAB, save_family
from tests.families.measure import loss_per_token
from tests.support.workers.engine_cases import WHOLE, make_engine

RESULTS = Path(__file__).with_name("speed.json")
LENGTHS = [40, 60, 90, 110, 140, 170, 200, 240]
ROUNDS = 3


def rows_of_many_lengths() -> DataProto:
    """Return eight rows of 40 to 240 tokens, all of them responses but the first four."""
    width, prompt = max(LENGTHS), 4
    real = (torch.arange(width) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(VOCAB, real.shape, generator=torch.Generator().manual_seed(0)) * real
    columns = {"input_ids": ids, "attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    columns |= {"response_mask": real[:, prompt:], "responses": ids[:, prompt:], "advantages": real[:, prompt:].float()}
    return DataProto.from_dict(tensors=columns)


def tokens_per_second(family: str, **layout: bool) -> float:
    """Return real tokens per CPU second of the fastest of some forward and backward passes."""
    batch, seconds = rows_of_many_lengths(), []
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(save_family(family, Path(folder, "model")), **layout)
        for _ in range(ROUNDS):
            began = time.process_time()
            engine.forward_backward(batch, WHOLE, loss_per_token(sum(LENGTHS)), outputs=("log_probs",))
            seconds.append(time.process_time() - began)
    return sum(LENGTHS) / min(seconds)


def measure_all() -> None:
    """Write the results of all families."""
    found = {}
    for family in FAMILIES:
        found[family] = [round(tokens_per_second(family, **layout)) for layout in ({}, {"packed": True})]
        print(family, found[family], file=sys.stderr, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
