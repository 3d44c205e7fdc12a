"""The reward of `examples/smollm`: 1 if the last number of the response is the answer, else 0.

There is no reward for the form of an answer. With one of 0.1 the model learned the form in a few steps and no longer
calculated.
"""

import re

NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number in the text, or None."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return the reward of a response."""
    return float(last_number(solution_str) == float(ground_truth))
