"""Code of the user's that enters itself in a registry when it is imported: formulas and models, in every process that needs them."""

from collections.abc import Sequence

from hybridrl.config.import_path import load_module
from hybridrl.config.ppo import PPOConfig
from hybridrl.config.sft import SFTConfig
from hybridrl.errors import ConfigError


def load_plugs(config: PPOConfig | SFTConfig) -> None:
    """Run the files and modules of `external_lib` and `algorithm.path`, once per process. The driver and every worker call it first.

    Raises ConfigError naming the key for what is not there or cannot be imported.
    """
    if isinstance(config, SFTConfig):
        _load(config.model.external_lib, key="model.external_lib")
        return
    _load(config.actor_rollout_ref.model.external_lib, key="actor_rollout_ref.model.external_lib")
    _load(config.algorithm.path, key="algorithm.path")


def _load(paths: Sequence[str], *, key: str) -> None:
    for path in paths:
        try:
            load_module(path)
        except ConfigError as error:
            raise ConfigError(f"{key}={path}: {error}") from error
