"""The score of a response: `compute_score` is called once for each, in a process of its own with a time limit."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 for the right number, and a little for digits, so that an untrained model has something to climb.

    `score` trains the model. The other numbers appear in the metrics, as `reward_extra/NAME/mean`.
    """
    numbers = re.findall(r"\d+", solution_str)
    is_right = numbers[-1:] == [ground_truth]
    digits = sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
    return {"score": 1.0 if is_right else 0.2 * digits, "acc": float(is_right), "digits": digits}
