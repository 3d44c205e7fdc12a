"""Registries behind settings that name a class, and the user's modules that register more.

`fields.plug` makes a setting of a registry. The schema needs the known names only, so a built-in class is declared here
by its address and imported when a driver or worker looks it up.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from hybridrl.config.introspection import keys, value_at
from hybridrl.errors import ConfigError
from hybridrl.import_path import load_module
from hybridrl.registry import Registry

_FSDP = "hybridrl.workers.engine.fsdp.engine:FSDPEngine"

ENGINES: Registry[Any] = Registry(
    "actor_rollout_ref.actor.strategy",
    kind="training engine",
    builtins={"fsdp": _FSDP, "fsdp2": _FSDP, "megatron": "hybridrl.workers.engine.megatron.engine:MegatronEngine"},
    plugins="[actor_rollout_ref.]model.external_lib",
)
"""Training engines: classes with the methods of `hybridrl.workers.engine.Engine`."""

REWARD_MANAGERS: Registry[Any] = Registry(
    "reward_model.reward_manager",
    kind="reward manager",
    builtins={
        "naive": "hybridrl.rewards.manager:RewardManager",
        "batch": "hybridrl.rewards.other_managers:BatchRewardManager",
        "dapo": "hybridrl.rewards.other_managers:DAPORewardManager",
    },
    plugins="algorithm.path",
)
"""Reward managers: subclasses of `hybridrl.rewards.RewardManager`, or classes with its constructor and call."""

TRACKERS: Registry[Any] = Registry(
    "trainer.logger",
    kind="logger",
    builtins={
        "console": "hybridrl.trainer.run.tracking:ConsoleTracker",
        "jsonl": "hybridrl.trainer.run.tracking:JsonlTracker",
        "tensorboard": "hybridrl.trainer.run.tensorboard:TensorBoardTracker",
        "wandb": "hybridrl.trainer.run.tracking_services:WandbTracker",
        "mlflow": "hybridrl.trainer.run.tracking_services:MlflowTracker",
    },
)
"""Loggers: classes with the methods of `hybridrl.trainer.run.tracking.Tracker`."""

PLUGINS = ("model.external_lib", "actor_rollout_ref.model.external_lib", "algorithm.path")
"""Settings with files and modules that register formulas, models or classes when they are imported."""


def import_problems(registry: Registry[Any], names: Iterable[str]) -> Iterator[str]:
    """Yield import paths without a class. Built-in classes are not imported here."""
    for name in names:
        if name not in registry.names():
            try:
                registry.lookup(name)
            except ConfigError as error:
                yield str(error)


def load_plugins(config: Any) -> None:
    """Import the modules of `PLUGINS`, once per process.

    The driver and every worker call it before anything else reads a registry.

    Raises:
        ConfigError: A path does not exist or cannot be imported; the message names its key.
    """
    schema: type = type(config)
    for key in PLUGINS:
        for path in value_at(config, key) if key in keys(schema) else ():
            try:
                load_module(path)
            except ConfigError as error:
                raise ConfigError(f"{key}={path}: {error}") from error
