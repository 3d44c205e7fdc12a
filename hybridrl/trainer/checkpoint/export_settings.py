"""Settings of a checkpoint for an export or for serving. The checkpoint may come from somebody else.

Used by `hybridrl export` and `hybridrl serve`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config import PPOConfig, from_dict
from hybridrl.config.engines import single_process_layout
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.registry import is_import_path
from hybridrl.trainer.checkpoint.reading import read_settings, read_trainer_state
from hybridrl.trainer.checkpoint.store import CONFIG, WORKING_DIRECTORY

MODEL = "actor_rollout_ref.model"
PLUGINS = (f"{MODEL}.external_lib", "algorithm.path")  # every process imports what they name
ENGINES = ("actor_rollout_ref.actor.strategy", "critic.strategy")  # a name, or an import path


def settings_for_export(path: str, *, trust_remote_code: bool) -> PPOConfig:
    """Return the settings of a PPO checkpoint for an export on the CPU, in one process.

    A relative model path is resolved from the working directory of the run, if it exists there.

    Args:
        path: The checkpoint.
        trust_remote_code: Run Python code that comes with the model or that the settings name. The checkpoint's own
            setting does not count: it may come from somebody else.

    Raises:
        ConfigError: The run used code of its own, and the caller does not trust it.
        CheckpointError: The settings are damaged, or name no model.
    """
    raw = read_settings(path)
    code = ", ".join(f"{key}={value}" for key, value in named_code(raw))
    if code and not trust_remote_code:
        raise ConfigError(
            f"{path}: its {CONFIG} names Python code ({code}); read the code, and say --trust-remote-code to run it"
        )
    config = from_dict(PPOConfig, raw)
    policy = config.actor_rollout_ref
    if policy.model.path is None:
        raise CheckpointError(f"{path}: its {CONFIG} has no {MODEL}.path, so it is no checkpoint of a PPO run")
    from_run = os.path.join(read_trainer_state(path).get(WORKING_DIRECTORY, os.curdir), policy.model.path)
    model = replace(policy.model, trust_remote_code=trust_remote_code and policy.model.trust_remote_code)
    model = replace(model, path=from_run) if os.path.exists(from_run) else model
    return replace(
        config,
        trainer=replace(config.trainer, device="cpu"),
        actor_rollout_ref=single_process_layout(replace(policy, model=model)),
    )


def named_code(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every setting that makes an export run Python code. Imports nothing."""
    for key in PLUGINS:
        if value := _value(settings, key):
            yield key, value
    for key in ENGINES:
        if isinstance(value := _value(settings, key), str) and is_import_path(value):
            yield key, value
    if _value(settings, key := f"{MODEL}.trust_remote_code"):
        yield key, f"true, for {_value(settings, f'{MODEL}.path')}"


def _value(settings: Any, key: str) -> Any:
    """Return the value at a dotted key of nested dictionaries, or None."""
    for name in key.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings
