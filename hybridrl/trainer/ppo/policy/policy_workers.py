"""`PolicyWorkers`: the worker groups of the policy, and whether its rollout sleeps.

Actor and rollout are placed in one of two ways:

* Hybrid (`Role.ActorRollout`, `Role.ActorRolloutRef`): weights go from engine to rollout inside each process.
* Separated (`Role.Actor` and `Role.Rollout`): rank 0 of the actor sends weights, every rollout process receives them.

A job that only validates a model has `Role.Rollout` alone.

`RayPPOTrainer` calls the groups in the driver. `RolloutPipeline` generates with them, and pushes weights.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.trainer.roles import ResourcePoolManager, Role

HYBRID = (Role.ActorRolloutRef, Role.ActorRollout)


class PolicyWorkers:
    """Worker groups of actor, rollout and reference.

    Args:
        groups: Role name -> worker group, as `launch` returns them.
        sleep: Whether to free the rollout's device memory during training on the same device.
        trains: Whether the job needs an actor.

    Attributes:
        hybrid: Group of actor and rollout in the same processes; None without one.
        actor, rollout, ref: Groups, some of them the same one; without training there is only `rollout`.
        asleep: Whether the rollout has to wake up before it generates or receives weights.

    Raises:
        ConfigError: A role of the policy is missing.
    """

    def __init__(self, groups: Mapping[str, Any], *, sleep: bool = False, trains: bool = True):
        self.hybrid: Any = next((groups[role] for role in HYBRID if role in groups), None)
        self.actor: Any = self.hybrid or groups.get(Role.Actor)
        self.rollout: Any = groups.get(Role.Rollout) or self.hybrid
        self.ref: Any = groups.get(Role.RefPolicy) or self.actor  # an actor with adapters is its own reference
        self.sleep, self.asleep = sleep, False
        if self.rollout is None or (trains and self.actor is None):
            raise ConfigError(
                "the policy needs Role.ActorRollout, or both Role.Actor and Role.Rollout, in role_worker_mapping"
            )
        if self.rollout is not self.hybrid:
            self.sleep_rollout()  # next to an actor it starts asleep; its first push wakes it

    def sleep_rollout(self) -> None:
        """Free the rollout's device memory until the next generation or push."""
        if self.sleep and not self.asleep:
            self.rollout.rollout_sleep()
            self.asleep = True

    def wake_rollout(self) -> None:
        """Let the rollout have its device memory again."""
        if self.asleep:
            if self.rollout is not self.actor:
                self.actor.free_cached_memory()
            self.rollout.rollout_wake_up()
            self.asleep = False


def make_policy_workers(groups: Mapping[str, Any], manager: ResourcePoolManager, config: PPOConfig) -> PolicyWorkers:
    """Return the `PolicyWorkers` of a job. `groups`: role name -> initialised worker group."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    on_cuda = any(getattr(pool, "use_gpu", False) for pool in manager.resource_pool_dict.values())
    on_cuda |= trainer.backend == "local" and trainer.device != "cpu" and torch.cuda.is_available()
    # With a lag, generation in the same process may not be finished when training begins: do not sleep.
    sleep = on_cuda and rollout.free_cache_engine and not trainer.lag and manager.share_a_pool(Role.Actor, Role.Rollout)
    return PolicyWorkers(groups, sleep=sleep, trains=not config.only_generates)
