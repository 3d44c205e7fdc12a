"""Score DAPO's mathematics data, whose prompts ask for a last line `Answer: ...` (arXiv 2503.14476).

Scores are +1 and -1 as that recipe uses them, not 1 and 0.
"""

import re
from typing import Any

from reward_score import math

ANSWER = re.compile(r"(?is).*answer\s*:(?:[\s*$]|\\\[[ \t]*\n)*([^\s*$][^\n]*)")  # the last one that text follows


def compute_score(solution_str: str, ground_truth: str | int) -> dict[str, Any]:
    """Return {"score": 1.0 or -1.0, "acc": bool, "pred": the answer found, or None}.

    The answer is the first line of text behind the last `Answer:`, else the last boxed one.
    """
    pred = extract_solution(solution_str)
    correct = pred is not None and math.equal(pred, str(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def extract_solution(solution_str: str) -> str | None:
    """Return the answer without box, asterisks, dollar signs and full stop, or None."""
    match = ANSWER.match(solution_str)
    line = match.group(1) if match else ""
    boxed = math.last_boxed(line)
    return boxed if boxed is not None else line.rstrip(" \t\r*.$") or math.last_boxed(solution_str)
