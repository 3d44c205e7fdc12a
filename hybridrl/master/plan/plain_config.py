"""Turn the config of a job into types that JSON can hold, so that it is part of the job's spec."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError


def plain_config(config: Any, *, key: str = "config") -> Any:
    """Return a config as JSON types. Mappings (also OmegaConf's) and namespaces become dicts.

    Raises:
        ConfigError: If JSON cannot hold a value. The message names the key.
    """
    if config is None or isinstance(config, bool | int | float | str):
        return config
    if isinstance(config, Mapping):
        return {str(name): plain_config(value, key=f"{key}.{name}") for name, value in config.items()}
    if isinstance(config, Sequence):
        return [plain_config(value, key=f"{key}[{i}]") for i, value in enumerate(config)]
    if hasattr(config, "__dict__") and not callable(config):
        return {
            name: plain_config(value, key=f"{key}.{name}")
            for name, value in vars(config).items()
            if not name.startswith("_")
        }
    raise ConfigError(
        f"{key}={config!r}: JSON cannot hold a {type(config).__name__}; give text, numbers, lists and dicts"
    )
