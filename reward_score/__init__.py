"""Scores of a response text, one file per task.

The table leads from a row's `data_source` to its score function.

Nothing here imports hybridrl, so that a score function can be used, tested and copied on its own. The functions have no
time limit: a hostile answer can keep `math` busy for long. `hybridrl.rewards` runs them in processes with a limit, and
scores a response as an empty one that exceeds it where `HARMLESS_RESPONSE` does not.
"""

from collections.abc import Callable
from typing import Any

from reward_score import code, environment, geometry3k, gsm8k, math, math_dapo

__all__ = [
    "DATA_SOURCES",
    "HARMLESS_RESPONSE",
    "default_compute_score",
    "has_score_function",
    "runs_programs",
    "unknown_source_text",
    "code",
    "environment",
    "geometry3k",
    "gsm8k",
    "math",
    "math_dapo",
]

DATA_SOURCES: dict[str, Callable[..., float | dict[str, Any]]] = {
    "openai/gsm8k": gsm8k.compute_score,
    "hybridrl/arithmetic": gsm8k.compute_score,
    "lighteval/MATH": math.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math.compute_score,
    "HuggingFaceH4/MATH-500": math.compute_score,
    "hiyouga/geometry3k": geometry3k.compute_score,
    "math_dapo": math_dapo.compute_score,
    "math_dapo_reasoning": math_dapo.compute_score,
    "codecontests": code.compute_score,
    "apps": code.compute_score,
    "codeforces": code.compute_score,
    "taco": code.compute_score,
    "livecodebench": code.compute_score,
    "mbpp": code.compute_score,
    "google-research-datasets/mbpp": code.compute_score,
    "openai_humaneval": code.compute_score,
    "openai/openai_humaneval": code.compute_score,
    "hybridrl/programs": code.compute_score,
    "environment": environment.compute_score,
}
"""Score function of each data source. Names that start with "aime" use that of `math_dapo`."""
HARMLESS_RESPONSE = "\\boxed{0}\n#### 0\nAnswer: 0"  # each function reads an answer in it


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    *,
    sandbox: code.Runner | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Return the score of `solution_str` by the function of its data source.

    A dict holds it under "score".

    Args:
        data_source: A key of `DATA_SOURCES`, or a name that starts with "aime".
        solution_str: The response.
        ground_truth: The reference answer.
        extra_info: Not used by the functions in the table.
        sandbox: Runs the programs of responses; only for data sources that `runs_programs` names.
        kwargs: Passed to the function (for instance `format_score` for gsm8k).

    Raises:
        NotImplementedError: The data source is not in the table.
    """
    if not has_score_function(data_source):
        raise NotImplementedError(unknown_source_text(data_source))
    score = math_dapo.compute_score if data_source.startswith("aime") else DATA_SOURCES[data_source]
    if runs_programs(data_source):
        kwargs["sandbox"] = sandbox
    return score(solution_str, ground_truth, **kwargs)


def has_score_function(data_source: str) -> bool:
    """Return whether `default_compute_score` can score this data source."""
    return data_source.startswith("aime") or data_source in DATA_SOURCES


def runs_programs(data_source: str) -> bool:
    """Return whether scoring this data source runs programs of the policy, which needs a sandbox."""
    return DATA_SOURCES.get(data_source) is code.compute_score


def unknown_source_text(data_source: str) -> str:
    """Return the error text for a data source without a score function."""
    return (
        f"no reward function for data_source={data_source!r}; there are {', '.join(DATA_SOURCES)} and aime*. "
        "Set your own with custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score"
    )
