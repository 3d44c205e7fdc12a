"""Shared by the data-plane benchmarks: the batch, and how contenders are timed in turn. Not a benchmark itself."""

import time
from collections.abc import Callable

import numpy as np
import torch

WIDE = ("input_ids", "attention_mask", "position_ids")
NARROW = ("prompts", "responses", "response_mask")
NUMBERS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "token_level_scores", "advantages", "returns")


def make_columns(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return 12 columns, half of the tokens responses: 48 bytes per token."""
    columns = {name: torch.randint(0, 50_000, (rows, tokens)) for name in WIDE}
    columns |= {name: torch.randint(0, 50_000, (rows, tokens // 2)) for name in NARROW}
    return columns | {name: torch.randn(rows, tokens // 2) for name in NUMBERS}


def clock(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that does the work once and returns its milliseconds."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    return run


def median_ms(contenders: list[Callable[[], float]], *, repeats: int) -> list[float]:
    """Return each contender's median over rounds. The order alternates between rounds; round 0 does not count."""
    times = np.zeros((repeats + 1, len(contenders)))
    for number in range(repeats + 1):
        order = range(len(contenders)) if number % 2 else reversed(range(len(contenders)))
        for index in order:
            times[number, index] = contenders[index]()
    return np.median(times[1:], axis=0).tolist()
