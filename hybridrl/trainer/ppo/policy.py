"""`PolicyGroups`: the policy's worker groups behind one face, whether actor and rollout share processes or not.

Hybrid (`Role.ActorRollout`, `Role.ActorRolloutRef`): weights go from engine to rollout inside each process. Separated
(`Role.Actor` and `Role.Rollout` on their own pools): rank 0 of the actor sends them, every rollout process receives
them; how is `weight_sync.py`'s business. Either way a push ends with the version and fingerprint each rollout process
reports, compared with what was sent; and whoever is asked to generate is told which version that has to be.

The policy of a job, from its groups and where they are: does the rollout share devices with training, does it generate
meanwhile?
"""

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.config.schema.workers import WeightSyncConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.trainer.ppo.weight_sync import InProcessSync, WeightSync
from hybridrl.trainer.roles import ResourcePoolManager, Role

HYBRID = (Role.ActorRolloutRef, Role.ActorRollout)


class PolicyGroups:
    """groups: role name -> worker group, as `launch` returns them. sleep: free the rollout's device memory while
    training, which is on the same device.

    weight_sync: the settings of pushes between processes. ahead: a rollout in processes of its own generates while the
    actor trains. agent_loops: who makes responses, where they are not made by one batched call (`AgentLoopManager`).
    """

    def __init__(
        self,
        groups: Mapping[str, Any],
        *,
        sleep: bool = False,
        weight_sync: WeightSyncConfig | None = None,
        ahead: bool = False,
        agent_loops: Any = None,
    ):
        self.hybrid = next((groups[str(role)] for role in HYBRID if str(role) in groups), None)
        self.actor = self.hybrid or groups.get(str(Role.Actor))
        self.rollout = self.hybrid or groups.get(str(Role.Rollout))
        self.ref = groups.get(str(Role.RefPolicy)) or groups.get(str(Role.ActorRolloutRef))
        self.sleep = sleep
        self.agent_loops = agent_loops
        self._asleep = False
        self._version: int | None = None  # of the weights that were pushed last
        if self.actor is None or self.rollout is None:
            raise ConfigError(
                "the policy needs Role.ActorRollout, or both Role.Actor and Role.Rollout, in role_worker_mapping"
            )
        settings = weight_sync or WeightSyncConfig()
        if self.hybrid is not None:
            self._sync: Any = InProcessSync(self.hybrid, settings)
        else:
            self._sync = WeightSync(self.actor, self.rollout, settings, ahead=ahead)
            self.rest()  # beside an actor it starts asleep, and its first push wakes it
        self._beside = ahead and agent_loops is not None and self.hybrid is None
        self._open_agent_loops()

    def _open_agent_loops(self) -> None:
        if self.agent_loops is not None:
            self.agent_loops.open(self.rollout, refill=None if self.hybrid else self._refill, beside=self._beside)

    def generate(self, prompts: DataProto) -> DataProto:
        """Return responses; see `ActorRolloutRefWorker.generate_sequences`."""
        self._wake_up()
        if self.agent_loops is not None:
            return self.agent_loops.generate_later(prompts, version=self._version).get()
        return self.rollout.generate_sequences(prompts, weights_version=self._version)

    def generate_later(self, prompts: DataProto) -> DataProtoFuture:
        """Have responses made, after whatever the rollout was told before."""
        self._wake_up()
        if self.agent_loops is not None:
            return self.agent_loops.generate_later(prompts, version=self._version)
        return self.rollout.generate_sequences.later(prompts, weights_version=self._version)

    def begin_later(self, prompts: DataProto, max_new_tokens: int) -> DataProtoFuture:
        """Have the first tokens of responses made; see `workers/rollout/partial.py`."""
        if self.agent_loops is not None:
            return self.agent_loops.begin_later(prompts, max_new_tokens, version=self._version)
        return self.rollout.begin_sequences.later(prompts, max_new_tokens, weights_version=self._version)

    def continue_later(self, begun: DataProtoFuture, max_new_tokens: int) -> DataProtoFuture:
        """Have more tokens made for responses that are open, by the weights the rollout has then."""
        if self.agent_loops is not None:
            return self.agent_loops.continue_later(begun, max_new_tokens, version=self._version)
        return self.rollout.continue_sequences.later(begun, max_new_tokens, weights_version=self._version)

    def _refill(self, rank: int) -> None:
        """Give a rollout process that was started anew the weights that the others have."""
        if self._beside:  # the actor may have newer ones
            self.rollout.execute_rank(rank, "receive_weights", *self._sync.held)
            return
        self.rollout.execute_rank(rank, "receive_weights", self._version, self.actor.store_weights.later()[0])
        self._sync.reopen()

    def rest(self) -> None:
        """Give the rollout's device memory to training until it generates or receives weights again."""
        if self.sleep and not self._asleep:
            self.rollout.rollout_sleep()
            self._asleep = True

    def push_weights(self, version: int) -> None:
        """Make every rollout process hold the actor's weights as `version`.

        Raises StaleWeightsError naming who does not.
        """
        self.push_weights_later(version).check()

    def push_weights_later(self, version: int) -> Any:
        """Have every rollout process take the actor's weights as they are now. Between pools they go from process to
        process.

        Returns something with a `check()` that waits for it and raises StaleWeightsError.
        """
        self._wake_up()
        self._version = version
        if self._beside:
            sent = self._sync.send_later(version)
            return self.agent_loops.push_later(version, lambda: self._sync.receive_later(version, sent).check())
        return self._sync.push_later(version)

    @property
    def channel(self) -> Any:
        """The address of the channel that pushes go over now, None where there is none.

        It means the same to another driver.
        """
        return self._sync.address

    def disconnect(self, reason: str) -> None:
        """Processes of the actor or the rollout will be replaced: end pushes and agent loops that are under way.

        Safe to call twice.
        """
        self._sync.abandon(reason)
        if self.agent_loops is not None:
            self.agent_loops.close(wait=True)

    def reconnect(self) -> None:
        """They were, after `disconnect`: the next push is one of everything, over a new channel.

        Agent loops begin anew, too. A rollout that sleeps between steps is woken by the push, whether it was replaced
        or not.
        """
        self._sync.reopen()
        self._asleep = self.sleep
        self._open_agent_loops()

    def gather_later(self) -> Any:
        """Return a reference to the actor's full weights as they are now, as `receive_weights` takes it, whenever that
        is.
        """
        return self.actor.store_weights.later()[0]

    def _wake_up(self) -> None:
        if self._asleep:
            if self.hybrid is None:
                self.actor.free_cached_memory()
            self.rollout.rollout_wake_up()
            self._asleep = False


def make_policy(
    groups: Mapping[str, Any], manager: ResourcePoolManager, config: PPOConfig, *, agent_loops: Any
) -> PolicyGroups:
    """Return the policy's groups behind one face. groups: role name -> worker group, initialised."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    on_cuda = any(getattr(pool, "use_gpu", False) for pool in manager.resource_pool_dict.values())
    on_cuda |= trainer.backend == "local" and trainer.device != "cpu" and torch.cuda.is_available()
    # Generation that runs ahead in the same process is not over when training begins.
    sleep = on_cuda and rollout.free_cache_engine and not trainer.lag and manager.on_one_pool(Role.Actor, Role.Rollout)
    ahead = trainer.lag > 0 or rollout.endpoint_port > 0
    return PolicyGroups(groups, sleep=sleep, weight_sync=rollout.weight_sync, ahead=ahead, agent_loops=agent_loops)
