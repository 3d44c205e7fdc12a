"""One interface to the policy's worker groups, whether actor and rollout share processes or not.

`RayPPOTrainer` uses it in the driver.

* Hybrid (`Role.ActorRollout`, `Role.ActorRolloutRef`): weights go from engine to rollout inside each process.
* Separated (`Role.Actor` and `Role.Rollout`): rank 0 of the actor sends weights, every rollout process receives them.
* Both (`Role.ActorRollout` and `Role.Rollout`): separated, and the actor's processes have a rollout, too, which
  generates while the trainer waits (`trainer.hybrid_rollout`).

A push has two layers. `PolicyGroups` decides on its version, its place among the generations, and who waits.
`weight_sync.py` has one class per placement that starts both halves. Each push ends with a check: every rollout process
reports the version and fingerprint of its weights, which must match what was sent. Every generation request names the
weight version it expects.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.config.schema.workers import WeightSyncConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.policy.generation import BatchedGenerator, Generator, Pending, PendingResponses
from hybridrl.trainer.ppo.policy.weight_sync import (
    CrossProcessWeightSync,
    HybridRollout,
    InProcessWeightSync,
    WeightSync,
)
from hybridrl.trainer.roles import ResourcePoolManager, Role

HYBRID = (Role.ActorRolloutRef, Role.ActorRollout)


class PolicyGroups:
    """The policy's worker groups: actor, rollout, reference.

    Args:
        groups: Role name -> worker group, as `launch` returns them.
        sleep: Whether to free the rollout's device memory during training on the same device.
        weight_sync: Settings of pushes between processes.
        overlaps_training: Whether a rollout in separate processes generates while the actor trains.
        generator: Generates the responses. None: one batched call to the rollout.

    Raises:
        ConfigError: A role of the policy is missing.
    """

    def __init__(
        self,
        groups: Mapping[str, Any],
        *,
        sleep: bool = False,
        weight_sync: WeightSyncConfig | None = None,
        overlaps_training: bool = False,
        generator: Generator | None = None,
    ):
        self.hybrid: Any = next((groups[role] for role in HYBRID if role in groups), None)
        self.actor: Any = self.hybrid or groups.get(Role.Actor)
        self.rollout: Any = groups.get(Role.Rollout) or self.hybrid
        self.ref: Any = groups.get(Role.RefPolicy) or self.actor  # an actor with adapters is its own reference
        self.sleep = sleep
        self.generator: Generator = generator or BatchedGenerator()
        self._asleep = False
        self._version: int | None = None  # of the last push
        if self.actor is None or self.rollout is None:
            raise ConfigError(
                "the policy needs Role.ActorRollout, or both Role.Actor and Role.Rollout, in role_worker_mapping"
            )
        settings = weight_sync or WeightSyncConfig()
        self._hybrid_rollout: HybridRollout | None = None
        if self.rollout is self.hybrid:
            self._sync: WeightSync = InProcessWeightSync(self.hybrid, settings)
        else:
            sync = CrossProcessWeightSync(self.actor, self.rollout, settings, overlaps_training=overlaps_training)
            self._sync = sync
            if self.hybrid is not None:
                self._hybrid_rollout = HybridRollout(self.hybrid, sync)
            self.sleep_rollout()  # next to an actor it starts asleep; its first push wakes it
        self._concurrent = overlaps_training and self.rollout is not self.hybrid
        self._open_generator()

    def generate(self, prompts: DataProto) -> DataProto:
        """Return responses, see `ActorRolloutRefWorker.generate_sequences`."""
        self._wake_up()
        return self.generator.generate(prompts, version=self._version)

    def generate_async(self, prompts: DataProto) -> PendingResponses:
        """Start generating responses, after all calls submitted to the rollout before."""
        self._wake_up()
        return self.generator.submit(prompts, version=self._version)

    def generate_short_round_async(self, prompts: DataProto, num_prompts: int, max_new_tokens: int) -> PendingResponses:
        """Start generating responses until those to `num_prompts` prompts are complete."""
        self._wake_up()
        return self.generator.submit_short_round(prompts, num_prompts, max_new_tokens, version=self._version)

    def begin_partial_async(self, prompts: DataProto, max_new_tokens: int) -> PendingResponses:
        """Start generating the first tokens of responses, see `workers/rollout/partial.py`."""
        return self.generator.submit_partial(prompts, max_new_tokens, version=self._version)

    def continue_partial_async(self, partial: PendingResponses, max_new_tokens: int) -> PendingResponses:
        """Start generating more tokens for open responses, with the weights the rollout has at that time."""
        return self.generator.continue_partial(partial, max_new_tokens, version=self._version)

    def sleep_rollout(self) -> None:
        """Free the rollout's device memory until the next generation or push."""
        if self.sleep and not self._asleep:
            self.rollout.rollout_sleep()
            self._asleep = True

    def push_weights(self, version: int) -> None:
        """Push the actor's weights to every rollout process as `version`, and wait.

        Raises:
            StaleWeightsError: Some rollout processes do not hold them; names the ranks.
        """
        self.push_weights_async(version).wait()

    def push_weights_async(self, version: int) -> Pending:
        """Start a push of the actor's weights as they are now.

        Returns an object whose `wait()` waits for the push and raises StaleWeightsError.
        """
        self._wake_up()
        self._version = version
        return self.generator.push(version, self._sync.send(version))

    @property
    def weight_channel(self) -> Any:
        """Address of the channel for pushes, None without one. Valid in other drivers, too."""
        return self._sync.address

    def disconnect(self, reason: str) -> None:
        """Cancel pushes and close the generator before processes of actor or rollout are replaced.

        Safe to call twice.
        """
        self._sync.cancel(reason)
        self.generator.close(wait=True)

    def reconnect(self) -> None:
        """Prepare for the replaced processes, after `disconnect`.

        The next push is a full one over a new channel, and the generator is opened again. The push also wakes a rollout
        that sleeps between steps, whether it was replaced or not.
        """
        self._sync.reset()
        if self._hybrid_rollout is not None:
            self._hybrid_rollout.reset()
        self._asleep = self.sleep
        self._open_generator()

    def _open_generator(self) -> None:
        hybrid = {} if self._hybrid_rollout is None else {"hybrid": self._hybrid_rollout}
        self.generator.open(self.rollout, resync=self._sync.resend, concurrent=self._concurrent, **hybrid)

    def export_weights_async(self) -> Any:
        """Return a reference to the actor's full weights as they are now, an argument for `receive_weights`."""
        return self.actor.store_weights.submit()[0]

    def _wake_up(self) -> None:
        if self._asleep:
            if self.rollout is not self.actor:
                self.actor.free_cached_memory()
            self.rollout.rollout_wake_up()
            self._asleep = False


def make_policy(
    groups: Mapping[str, Any], manager: ResourcePoolManager, config: PPOConfig, *, generator: Generator
) -> PolicyGroups:
    """Return the `PolicyGroups` of a job. `groups`: role name -> initialised worker group."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    on_cuda = any(getattr(pool, "use_gpu", False) for pool in manager.resource_pool_dict.values())
    on_cuda |= trainer.backend == "local" and trainer.device != "cpu" and torch.cuda.is_available()
    # With a lag, generation in the same process may not be finished when training begins: do not sleep.
    sleep = on_cuda and rollout.free_cache_engine and not trainer.lag and manager.share_a_pool(Role.Actor, Role.Rollout)
    overlaps_training = trainer.lag > 0 or rollout.endpoint_port > 0
    return PolicyGroups(
        groups,
        sleep=sleep,
        weight_sync=rollout.weight_sync,
        overlaps_training=overlaps_training,
        generator=generator,
    )
