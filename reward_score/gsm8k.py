"""Score GSM8K: the number after the last `####` against the reference number.

The format is that of the dataset's own solutions (Cobbe et al., arXiv 2110.14168). Only the answer counts, never the
steps.
"""

import re
from decimal import Decimal
from typing import Literal

NUMBER = r"(?:[-+]\$?|\$[-+]?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"  # one sign, before or behind a dollar sign
STRICT = re.compile(rf"####[ \t]*({NUMBER})")
FLEXIBLE = re.compile(rf"(?<![\d.])({NUMBER})")


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """Return the answer as a plain decimal, or None if there is none.

    A plain decimal is "1234.5", without comma and dollar sign.

    Args:
        solution_str: The response.
        method: "strict" reads the number right after the last `####`, else None; "flexible" takes the last number in
            the text.
    """
    if method == "strict":
        _, mark, tail = solution_str.rpartition("####")
        match = STRICT.match(mark + tail)
        return normalise(match.group(1)) if match else None
    if method == "flexible":
        numbers = FLEXIBLE.findall(solution_str)
        return normalise(numbers[-1]) if numbers else None
    raise ValueError(f"method={method!r}: use 'strict' or 'flexible'")


def normalise(number: str) -> str:
    """Return a number's text without commas, dollar sign and plus sign."""
    return re.sub(r"[,$+]", "", number)


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right number, `format_score` for another one, else 0.

    Numbers are compared as numbers: 18, 18.0 and $18 are equal. Raises ValueError if `ground_truth` is not a number.
    """
    truth = re.fullmatch(NUMBER, str(ground_truth).strip())
    if truth is None:
        raise ValueError(f"ground_truth={ground_truth!r} is not a number")
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if Decimal(answer) == Decimal(normalise(truth.group())) else format_score
