"""The policy of a job, from its groups and where they are: does the rollout share devices with training, does it generate meanwhile?"""

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.trainer.policy import PolicyGroups
from hybridrl.trainer.roles import ResourcePoolManager, Role


def make_policy(groups: Mapping[str, Any], manager: ResourcePoolManager, config: PPOConfig, *, agent_loops: Any) -> PolicyGroups:
    """Return the policy's groups behind one face. groups: role name -> worker group, initialised."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    on_cuda = any(getattr(pool, "use_gpu", False) for pool in manager.resource_pool_dict.values())
    on_cuda |= trainer.backend == "local" and trainer.device != "cpu" and torch.cuda.is_available()
    # Generation that runs ahead in the same process is not over when training begins.
    sleep = on_cuda and rollout.free_cache_engine and not trainer.lag and manager.on_one_pool(Role.Actor, Role.Rollout)
    ahead = trainer.lag > 0 or rollout.endpoint_port > 0
    return PolicyGroups(groups, sleep=sleep, weight_sync=rollout.weight_sync, ahead=ahead, agent_loops=agent_loops)
