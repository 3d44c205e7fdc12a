"""Geometry3K: problems about a figure, answered in a box after thoughts in tags, as in verl."""

import re

from reward_score import math

FORMAT = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
FORMAT_SHARE = 0.1


def compute_score(solution_str: str, ground_truth: str) -> float:
    r"""Return 0.9 for a right last `\boxed{...}`, plus 0.1 for thoughts in `<think>` tags before it."""
    is_formatted = FORMAT.fullmatch(solution_str) is not None
    return (1 - FORMAT_SHARE) * math.compute_score(solution_str, ground_truth) + FORMAT_SHARE * is_formatted
