"""Judgements of a text: one file per task, and the table from a row's `data_source` to its judge.

Not here: how calls are spread over processes and limited in time (`hybridrl.rewards`). Nothing here imports hybridrl,
so a judge can be used, tested and copied on its own. The functions set no time limit: a hostile answer can keep `math`
busy for long.
"""

from collections.abc import Callable
from typing import Any

from reward_score import gsm8k, math, math_dapo

__all__ = ["DATA_SOURCES", "default_compute_score", "gsm8k", "math", "math_dapo"]

DATA_SOURCES: dict[str, Callable[..., float | dict[str, Any]]] = {
    "openai/gsm8k": gsm8k.compute_score,
    "hybridrl/arithmetic": gsm8k.compute_score,
    "lighteval/MATH": math.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math.compute_score,
    "HuggingFaceH4/MATH-500": math.compute_score,
    "math_dapo": math_dapo.compute_score,
    "math_dapo_reasoning": math_dapo.compute_score,
}
"""Judge of each data source. Names that start with "aime" are judged as `math_dapo`."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, **kwargs: Any
) -> float | dict[str, Any]:
    """Return the score of `solution_str` by the judge of its data source; a dict holds it under "score".

    `kwargs` go to the judge (for instance `format_score` for gsm8k); `extra_info` is not used by the judges in the
    table. Raises NotImplementedError for a data source that is not in the table.
    """
    judge = math_dapo.compute_score if data_source.startswith("aime") else DATA_SOURCES.get(data_source)
    if judge is None:
        raise NotImplementedError(
            f"no reward function for data_source={data_source!r}; known are {', '.join(DATA_SOURCES)} and aime*. "
            "Give your own with custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score"
        )
    return judge(solution_str, ground_truth, **kwargs)
