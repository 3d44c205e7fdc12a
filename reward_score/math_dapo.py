"""Score DAPO's mathematics data, whose prompts ask for a last line `Answer: ...` (arXiv 2503.14476).

Scores are +1 and -1 as that recipe uses them, not 1 and 0.
"""

import re
from typing import Any

from reward_score import math

ANSWER = re.compile(r"(?i)answer\s*:[ \t]*([^\n]+)")


def compute_score(solution_str: str, ground_truth: str | int) -> dict[str, Any]:
    """Return {"score": 1.0 or -1.0, "acc": bool, "pred": the answer found, or None}.

    The answer is what follows the last `Answer:` up to the end of that line, else the last boxed one.
    """
    pred = extract_solution(solution_str)
    correct = pred is not None and math.equal(pred, str(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def extract_solution(solution_str: str) -> str | None:
    """Return the answer without box, dollar signs and full stop, or None."""
    lines = ANSWER.findall(solution_str)
    if not lines:
        return math.last_boxed(solution_str)
    boxed = math.last_boxed(lines[-1])
    return boxed if boxed is not None else lines[-1].strip().strip("*").removesuffix(".").strip().strip("$").strip()
