"""Build the reward manager that a config selects, and test its reward function before anything else starts."""

import os
from typing import Any

from hybridrl.config.plugs import REWARD_MANAGERS as REWARD_MANAGERS
from hybridrl.config.reward_limits import RewardLimits
from hybridrl.config.schema.ppo import CustomRewardConfig, PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.rewards.function_address import BATCH_ARGUMENTS, FunctionAddress
from hybridrl.rewards.manager import DEFAULT_FUNCTION, Scorer
from hybridrl.rewards.process import LoadFailure

MAX_PROCESSES = 4  # default: calls that hang are waited for in parallel, and the machine keeps its other cores
HINTS = {
    "path": "give an existing .py file or an importable module",
    "name": "set custom_reward_function.name to the function's name in that file",
    "signature": "take these keyword arguments, or **kwargs",
    "import": "make it load in a new Python process first",
}


def load_reward_manager(config: PPOConfig, tokenizer: Any, *, num_examine: int = 0, validate: bool = False) -> Scorer:
    """Return the manager of `reward_model.reward_manager`, with the custom or the built-in function.

    A custom function is loaded once in a score process. A mistake in it is then a ConfigError here and not a failure of
    every sample.

    Args:
        config: Selects manager and function.
        tokenizer: Decodes responses.
        num_examine: Samples of each data source to log, once.
        validate: The manager scores validation (`RewardManager`).
    """
    model = config.reward_model
    manager = REWARD_MANAGERS.lookup(model.reward_manager)(
        tokenizer,
        num_examine,
        score_function(config),
        num_processes=model.num_processes or min(MAX_PROCESSES, os.cpu_count() or 1),
        timeout_s=model.timeout_s,
        max_response_length=config.data.max_response_length,
        overlong_buffer=model.overlong_buffer,
        validate=validate,
        **({"limits": RewardLimits.of(model.limits)} if model.limits else {}),
    )
    if config.custom_reward_function.path is not None and (failure := manager.check_function()) is not None:
        manager.close()
        raise ConfigError(describe_failure(config, failure))
    return manager


def score_function(config: PPOConfig) -> FunctionAddress:
    """Return the address of the configured function.

    Raises ConfigError for settings that name none.
    """
    custom, kind = config.custom_reward_function, config.reward_model.reward_manager
    arguments = REWARD_MANAGERS.lookup(kind).arguments
    if custom.path is not None:
        return FunctionAddress(custom.path, custom.name, kwargs=dict(custom.kwargs), arguments=arguments)
    if custom.name != CustomRewardConfig().name:
        raise ConfigError(f"custom_reward_function.name={custom.name}: in which file? set custom_reward_function.path")
    if arguments == BATCH_ARGUMENTS:
        raise ConfigError(
            f"reward_model.reward_manager={kind}: the built-in function takes one sample at a time; "
            f"set custom_reward_function.path to a file with compute_score({', '.join(arguments)}), or "
            "reward_manager=naive"
        )
    return FunctionAddress(*DEFAULT_FUNCTION, kwargs=dict(custom.kwargs))


def describe_failure(config: PPOConfig, failure: LoadFailure) -> str:
    """Return the error text for a function that cannot be used: key, value, reason, fix."""
    custom = config.custom_reward_function
    subject = f"path={custom.path}" if failure.kind in ("path", "import") else f"name={custom.name} in {custom.path}"
    return f"custom_reward_function.{subject}: {failure.reason}; {HINTS[failure.kind]}"
