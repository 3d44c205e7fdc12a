"""Means over prompts with 95 % confidence intervals: avg@n, pass@k, maj@n."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.trainer.ppo.metrics import majority_vote, pass_at_k

SEED = 42  # of majority voting's resamples
Z_95 = 1.959964  # normal distribution, two sides


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and half of its 95 % confidence interval; nan for a single prompt."""

    name: str
    mean: float
    half_width: float


def table(task: str, by_prompt: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return lines with the estimates of a task's scored samples, which `grouped` has grouped by prompt."""
    lines = [f"{task}: {len(by_prompt)} prompts, {sum(map(len, by_prompt))} samples"]
    for estimate in estimates(by_prompt):
        lines.append(f"  {estimate.name:12} {estimate.mean:7.4f} ± {estimate.half_width:.4f}")
    if by_prompt and not _have_answers(by_prompt) and min(map(len, by_prompt)) > 1:
        lines.append("  maj@n needs answers: let the reward function return them as `pred`, beside `score`")
    return lines


def _have_answers(by_prompt: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    return all("pred" in row for rows in by_prompt for row in rows)


def grouped(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the samples of each prompt; a sample's id begins with that of its prompt."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["id"].rpartition(":")[0], []).append(row)
    return [*found.values()]


def estimates(by_prompt: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Estimate]:
    """Yield the mean score (avg@n), pass@k for k = 1, 2, 4, ... n, and maj@n.

    pass@k needs scores of 0 or 1, maj@n the answers (`pred`). Every one is a mean over prompts of an estimate per
    prompt, so the interval is that of a mean of independent prompts. n is the smallest number of samples of a prompt.
    """
    if not by_prompt:
        return
    num = min(len(rows) for rows in by_prompt)
    scores = [[_accuracy(row) for row in rows] for rows in by_prompt]
    yield _mean(f"avg@{num}", [float(np.mean(values)) for values in scores])
    if {value for values in scores for value in values} <= {0.0, 1.0}:
        for k in _powers_of_two(num):
            yield _mean(f"pass@{k}", [pass_at_k(len(values), int(sum(values)), k) for values in scores])
    if num > 1 and _have_answers(by_prompt):
        voted = [
            majority_vote(np.array(values), [row["pred"] for row in rows], num, seed=SEED)[0]
            for values, rows in zip(scores, by_prompt, strict=True)
        ]
        yield _mean(f"maj@{num}", voted)


def _accuracy(row: Mapping[str, Any]) -> float:
    """Return the score of a sample without penalties. A reward function gives it to some samples only."""
    accuracy = row.get("acc")
    return float(row["score"] if accuracy is None else accuracy)


def _powers_of_two(limit: int) -> list[int]:
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent < limit]
    return [*powers, limit]


def _mean(name: str, values: Sequence[float]) -> Estimate:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Estimate(name, float(np.mean(values)), Z_95 * spread / math.sqrt(len(values)))
