"""Registries behind settings that name a class: built-in classes by address, and the user's own.

`fields.plug` makes a setting of a registry. The schema needs the known names only, so a built-in class is declared here
by its address and imported when a driver or worker looks it up.
"""

from typing import Any

from hybridrl.registry import Registry

_FSDP = "hybridrl.workers.engine.fsdp.engine:FSDPEngine"

ENGINES: Registry[Any] = Registry(
    "actor_rollout_ref.actor.strategy",
    kind="training engine",
    builtins={"fsdp": _FSDP, "fsdp2": _FSDP, "megatron": "hybridrl.workers.engine.megatron.engine:MegatronEngine"},
    plugins="actor_rollout_ref.model.external_lib",
)
"""Training engines: classes with the methods of `hybridrl.workers.engine.Engine`."""

REWARD_MANAGERS: Registry[Any] = Registry(
    "reward_model.reward_manager",
    kind="reward manager",
    builtins={
        "naive": "hybridrl.rewards.manager:RewardManager",
        "batch": "hybridrl.rewards.manager:BatchRewardManager",
        "dapo": "hybridrl.rewards.manager:DAPORewardManager",
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
