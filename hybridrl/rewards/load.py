"""Build the reward manager that a config selects, and test its reward function before anything else starts."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from hybridrl.config.plugs import REWARD_MANAGERS as REWARD_MANAGERS
from hybridrl.config.reward_limits import RewardLimits
from hybridrl.config.schema.ppo import CustomRewardConfig, PPOConfig
from hybridrl.config.schema.workers import SandboxFusionConfig
from hybridrl.errors import ConfigError
from hybridrl.rewards import sandbox
from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.rewards.manager import RewardManager, Scorer
from hybridrl.rewards.process import LoadFailure

MAX_PROCESSES = 4  # default: calls that hang are waited for in parallel, and the machine keeps its other cores
START_S = 1.0  # of the time of a reward call: for the namespaces of a program, and to compare
MEMBERS = ("check_function", "close")  # of `Scorer`, beside its call
HINTS = {
    "path": "give an existing .py file or an importable module",
    "name": "set custom_reward_function.name to the function's name in that file",
    "signature": "take these keyword arguments, or **kwargs",
    "import": "make it load in a new Python process first",
}


def load_reward_manager(
    config: PPOConfig,
    tokenizer: Any,
    *,
    num_examine: int = 0,
    validate: bool = False,
    compute_score: Callable[..., Any] | None = None,
) -> Scorer:
    """Return the manager of `reward_model.reward_manager`, with the custom or the built-in function.

    A custom function is loaded once in a score process. A mistake in it is then a ConfigError here and not a failure of
    every sample.

    Args:
        config: Selects manager and function.
        tokenizer: Decodes responses.
        num_examine: Samples of each data source to log, once.
        validate: The manager scores validation (`RewardManager`).
        compute_score: Reward function of the calling program, in place of the one that the settings name.
    """
    model = config.reward_model
    function = score_function(config, compute_score)
    settings = {
        "num_processes": num_processes(config),
        "timeout_s": model.timeout_s,
        "max_response_length": config.data.max_response_length,
        "overlong_buffer": model.overlong_buffer,
        "validate": validate,
        **({"limits": RewardLimits.of(model.limits)} if model.limits else {}),
    }
    manager = _constructed(model.reward_manager, (tokenizer, num_examine, function), settings)
    if not function.is_built_in and (failure := manager.check_function()) is not None:
        manager.close()
        raise ConfigError(describe_failure(config.custom_reward_function, failure, function))
    return manager


def _constructed(name: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Scorer:
    """Return the manager of this name, with these arguments of its constructor.

    Raises:
        ConfigError: It takes other arguments, or it leaves out what the driver needs: it may be one for verl.
    """
    cls = REWARD_MANAGERS.lookup(name)
    key, own = f"reward_model.reward_manager={name}", f"{cls.__name__}.__init__"
    try:
        inspect.signature(cls).bind(*arguments, **settings)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {own} does not take what it gets ({error}); take *args and **kwargs, and pass them on"
        ) from error
    manager: Scorer = cls(*arguments, **settings)
    if isinstance(manager, RewardManager) and not hasattr(manager, "processes"):
        raise ConfigError(f"{key}: {own} does not call super().__init__(*args, **kwargs), which starts what calls need")
    if missing := [member for member in MEMBERS if not hasattr(manager, member)]:
        raise ConfigError(
            f"{key}: {cls.__name__} has no {', '.join(missing)}; derive it from hybridrl.rewards.RewardManager and "
            "override run_calls or adjust (docs/extending.md)"
        )
    return manager


def score_function(config: PPOConfig, compute_score: Callable[..., Any] | None) -> FunctionAddress:
    """Return the address of the program's function, else of the one that the settings name, else of the built-in one.

    Raises:
        ConfigError: There is none, or the program's function cannot be sent to a process.
    """
    custom, model = config.custom_reward_function, config.reward_model
    manager = REWARD_MANAGERS.lookup(model.reward_manager)
    arguments = getattr(manager, "arguments", RewardManager.arguments)
    if compute_score is not None:
        try:
            return FunctionAddress.of(compute_score, kwargs=custom.kwargs, arguments=arguments)
        except Exception as error:  # pickling runs code of the objects that the function refers to
            raise ConfigError(
                f"reward_fn={compute_score!r} cannot be sent to a score process: {error}; refer to no open files, "
                "locks or loaded models, and create them inside the function"
            ) from error
    if custom.path is not None:
        return FunctionAddress(custom.path, custom.name, kwargs=dict(custom.kwargs), arguments=arguments)
    if custom.name != CustomRewardConfig().name:
        raise ConfigError(f"custom_reward_function.name={custom.name}: in which file? set custom_reward_function.path")
    runner = program_runner(model.sandbox_fusion, model.timeout_s, num_processes=num_processes(config))
    return FunctionAddress.of(None, kwargs={"sandbox": runner, **custom.kwargs}, arguments=arguments)


def program_runner(settings: SandboxFusionConfig, timeout_s: float, *, num_processes: int) -> "sandbox.ProgramRunner":
    """Return the sandbox of these settings for one reward process. Starts nothing.

    timeout_s: Of a call.
    """
    return sandbox.ProgramRunner(
        url=settings.url,
        max_concurrent=max(1, settings.max_concurrent // num_processes),
        memory_limit_mb=settings.memory_limit_mb,
        time_limit_s=settings.timeout_s,
        budget_s=timeout_s - settings.timeout_s - START_S,
    )


def num_processes(config: PPOConfig) -> int:
    """Return how many processes run reward functions."""
    return config.reward_model.num_processes or min(MAX_PROCESSES, os.cpu_count() or 1)


def describe_failure(custom: CustomRewardConfig, failure: LoadFailure, function: FunctionAddress) -> str:
    """Return the error text for a function that cannot be used: key, value, reason, fix."""
    if function.path is None:
        return f"reward_fn={function.name}: {failure.reason}; {HINTS[failure.kind]}"
    subject = f"path={custom.path}" if failure.kind in ("path", "import") else f"name={custom.name} in {custom.path}"
    return f"custom_reward_function.{subject}: {failure.reason}; {HINTS[failure.kind]}"
