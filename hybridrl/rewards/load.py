"""The reward manager that a config asks for, its reward function tried before anything else starts."""

import os
from typing import Any

from hybridrl.config.schema.ppo import CustomRewardConfig, PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.rewards.function_address import BATCH_ARGUMENTS, ScoreFunction
from hybridrl.rewards.manager import DEFAULT_FUNCTION, REWARD_MANAGERS, RewardManager
from hybridrl.rewards.process import LoadFailure

MAX_PROCESSES = (
    4  # unless told otherwise: calls that hang are waited for side by side, and no machine is filled with children
)
WAY_OUT = {
    "path": "give an existing .py file or an importable module",
    "name": "set custom_reward_function.name to the function's name in that file",
    "signature": "take these keyword arguments, or **kwargs",
    "import": "make it load in a Python of its own first",
}


def load_reward_manager(
    config: PPOConfig, tokenizer: Any, *, num_examine: int = 0, validate: bool = False
) -> RewardManager:
    """Return the manager of `reward_model.reward_manager` with `custom_reward_function`, or the built-in function if
    that is not set.

    validate: it scores validation, see `RewardManager`. A custom function is loaded once in a score process, so a
    mistake in it is a ConfigError here and not a thousand failed samples.
    """
    model = config.reward_model
    manager = REWARD_MANAGERS[model.reward_manager](
        tokenizer,
        num_examine,
        score_function(config),
        num_processes=model.num_processes or min(MAX_PROCESSES, os.cpu_count() or 1),
        timeout_s=model.timeout_s,
        max_response_length=config.data.max_response_length,
        overlong_buffer=model.overlong_buffer,
        validate=validate,
    )
    if config.custom_reward_function.path is not None and (failure := manager.processes.check()) is not None:
        manager.close()
        raise ConfigError(explain(config, failure))
    return manager


def score_function(config: PPOConfig) -> ScoreFunction:
    """Return the address of the configured function. Raises ConfigError for settings that name none."""
    custom, kind = config.custom_reward_function, config.reward_model.reward_manager
    arguments = REWARD_MANAGERS[kind].arguments
    if custom.path is not None:
        return ScoreFunction(custom.path, custom.name, kwargs=dict(custom.kwargs), arguments=arguments)
    if custom.name != CustomRewardConfig().name:
        raise ConfigError(f"custom_reward_function.name={custom.name}: in which file? set custom_reward_function.path")
    if arguments == BATCH_ARGUMENTS:
        raise ConfigError(
            f"reward_model.reward_manager={kind}: the built-in function takes one sample at a time; "
            f"set custom_reward_function.path to a file with compute_score({', '.join(arguments)}), or "
            "reward_manager=naive"
        )
    return ScoreFunction(*DEFAULT_FUNCTION, kwargs=dict(custom.kwargs))


def explain(config: PPOConfig, failure: LoadFailure) -> str:
    """Return the message for a function that cannot be used: key, value, reason, way out."""
    custom = config.custom_reward_function
    subject = f"path={custom.path}" if failure.kind in ("path", "import") else f"name={custom.name} in {custom.path}"
    return f"custom_reward_function.{subject}: {failure.reason}; {WAY_OUT[failure.kind]}"
