"""What the tests of the whole registry give to an estimator or a loss, by its name or by its parameters.

A new entry is tested without a line here if its columns can have any value (`column`) and its settings have defaults
that train. Otherwise this file is the one place that says what it needs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

F64 = torch.float64
NON_NEGATIVE_SCORES = ("maxrl",)
"""Estimators that refuse a score below 0."""
SPECIAL_COLUMNS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "group_B": lambda rows, tokens: torch.arange(rows) // 3 * 10 - 5,
    "cov_selected_BT": lambda rows, tokens: torch.rand(rows, tokens) < 0.3,
}
LOSS_SETTINGS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
}
"""Settings of `actor.policy_loss` without which a loss is refused, or has no effect on a few short rows."""
RUN_SETTINGS: dict[str, dict[str, object]] = {
    "gdpo": {"algorithm__gdpo_reward_keys": "[score]"},
    "bypass_mode": {
        "algorithm__rollout_correction__bypass_mode": True,
        "algorithm__rollout_correction__loss_type": "reinforce",
        "algorithm__rollout_correction__rollout_is": "sequence",
        "algorithm__rollout_correction__rollout_rs": "[seq_max_k3,token_k1]",
        "algorithm__rollout_correction__rollout_rs_threshold": "[1e-4,1.02]",  # rejects some tokens in the second epoch
    },
}
"""Other settings of `main_ppo` that an estimator or a loss needs."""
PREFERENCE_SETTINGS = {"beta": 0.3, "simpo_gamma": 0.5}


def run_settings(*names: str) -> dict[str, object]:
    """Return the settings of `main_ppo` that a run of these estimators and losses needs; dots are `__`."""
    found: dict[str, object] = {}
    for name in names:
        prefix = "actor_rollout_ref__actor__policy_loss__"
        found |= RUN_SETTINGS.get(name, {}) | {
            prefix + key: value for key, value in LOSS_SETTINGS.get(name, {}).items()
        }
    return found


def column(name: str, rows: int, tokens: int) -> torch.Tensor:
    """Return values for a parameter: (B, T), (B, 2) or (B,) by the end of its name.

    Log-probs are negative.
    """
    if name in SPECIAL_COLUMNS:
        return SPECIAL_COLUMNS[name](rows, tokens)
    shape = {"BT": (rows, tokens), "BK": (rows, 2), "B": (rows,)}[name.rpartition("_")[2]]
    values = torch.rand(shape, dtype=F64) + 0.05
    return -values if "log_prob" in name else values


def columns_of(fn: Callable[..., Any], rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return a column for each keyword parameter of the function that takes one."""
    parameters = inspect.signature(fn).parameters.values()
    own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return {name: column(name, rows, tokens) for name in own if name.rpartition("_")[2] in ("B", "BT", "BK")}
