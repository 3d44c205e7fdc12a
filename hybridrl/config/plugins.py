"""Load plugin modules, which register formulas or models when they are imported.

The driver and every worker call `load_plugins` before anything else reads a registry.
"""

from collections.abc import Sequence
from typing import Any

from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SupervisedConfig
from hybridrl.errors import ConfigError
from hybridrl.import_path import load_module


def load_plugins(config: Any) -> None:
    """Import the files and modules of `external_lib` and `algorithm.path`, once per process.

    The driver and every worker call it before anything else. Other configs than PPO's and SFT's have no plugins.

    Raises:
        ConfigError: A path does not exist or cannot be imported; the message names its key.
    """
    if isinstance(config, SupervisedConfig):
        _load(config.model.external_lib, key="model.external_lib")
    if not isinstance(config, PPOConfig):
        return
    _load(config.actor_rollout_ref.model.external_lib, key="actor_rollout_ref.model.external_lib")
    _load(config.algorithm.path, key="algorithm.path")


def _load(paths: Sequence[str], *, key: str) -> None:
    for path in paths:
        try:
            load_module(path)
        except ConfigError as error:
            raise ConfigError(f"{key}={path}: {error}") from error
