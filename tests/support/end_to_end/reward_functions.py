"""Reward functions that score processes import; this module imports nothing, so that they start fast."""


def share_of_digits(solution_str, ground_truth, extra_info, **_):
    """Return the share of digits in the response. The row's columns must have arrived."""
    assert int(ground_truth) == 2 * extra_info["level"]
    score = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
    return {"score": score, "level": extra_info["level"]}


def takes_completions(completions):
    """Take another library's arguments."""
    return [0.0 for _ in completions]
