"""Pushes of a policy's weights: the calls of actor and rollout.

`ActorRolloutRefWorker` inherits them; they run in a worker process. The trainer's side is
`trainer/ppo/policy/weight_sync.py`, the bytes are moved by `weight_transfer`.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hybridrl.config.engines import engine_settings
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.single_controller.cluster import node_address
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.system.machine import shared_memory_id
from hybridrl.workers import weight_transfer
from hybridrl.workers.engine.base import Engine
from hybridrl.workers.engine_worker import TrainingWorker
from hybridrl.workers.rollout.base import Rollout, RolloutHealth, sent_dtypes
from hybridrl.workers.rollout.probe import sample_probe
from hybridrl.workers.rollout.requests import Probe

if TYPE_CHECKING:
    from hybridrl.workers.weight_transfer import PushReceipt, Receivers, Sender, SenderAddress


class WeightPushMixin(TrainingWorker):
    """Weight pushes, and the memory that a rollout holds between them. An actor sends, a rollout receives.

    Attributes:
        actor: Only in a process that trains.
        rollout: Only in a process that generates.
    """

    config: PPOConfig
    actor: Engine
    rollout: Rollout
    _sender: "Sender | None"

    @functools.cached_property
    def _receivers(self) -> "Receivers":
        timeout_s = self.config.trainer.call_timeout_s
        return weight_transfer.Receivers(rank=self.rank, device=self.device, timeout_s=timeout_s)

    @property
    def trained_engine(self) -> Engine:
        return self.actor

    @property
    def _engine_settings(self) -> EngineSettings:
        return engine_settings(self.config.actor_rollout_ref.actor)

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int, adapters: bool = False, probe: Probe | None = None) -> RolloutHealth:
        """Push the actor's weights into this process's rollout as `version`.

        Args:
            version: Version of the weights.
            adapters: Whether to push the adapters alone. Needs an earlier full push.
            probe: What the rollout samples after it.

        Raises:
            StaleWeightsError: The rollout's weights differ from the pushed ones.
        """
        self.rollout_wake_up()
        with self._trained():
            health = self.rollout.load_weights(version, self._weights_to_push(adapters), adapters=adapters)
        return self._with_probe(health, probe)

    def _with_probe(self, health: RolloutHealth, probe: Probe | None) -> RolloutHealth:
        """Return the health with what the rollout samples for a probe."""
        return health if probe is None else replace(health, probed=sample_probe(self.rollout, probe))

    def _weights_to_push(self, adapters: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights of a push: all, or the adapters alone."""
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.quantization is not None:
            grid = weight_transfer.GRIDS[rollout.quantization]
            return weight_transfer.quantized_weights(self.actor.weights(), grid)
        if rollout.weight_sync.lora == "merged":
            return self.actor.weights()
        return self.actor.weights(lora="adapters" if adapters else "base_and_adapters")

    @register(Dispatch.ONE_TO_ALL)
    def open_weight_channel(self, transport: str, num_receivers: int) -> "SenderAddress | None":
        """Prepare rank 0 for pushes to rollouts in other processes.

        Called again after a failed push, or when the rollout's processes were replaced. Closes the old channel.

        Returns:
            Address that the rollouts connect to, None if the transport has none or on other ranks.
        """
        if self.rank != 0:
            return None
        if self._sender is not None:
            self._sender.close()
        # The ranks' own address may be the loopback one, which rollouts on another machine cannot reach.
        host = self.get_master_addr_port()[0] if transport == "shared_memory" else node_address()
        self._sender = self._make_sender(transport, host=host, num_receivers=num_receivers)
        return self._sender.address

    @register(Dispatch.ONE_TO_ALL)
    def machine_id(self) -> str:
        """Return the id of this process's machine, see `shared_memory_id`."""
        return shared_memory_id()

    @register(Dispatch.ONE_TO_ALL)
    def join_weight_channel(self, address: "SenderAddress") -> None:
        """Connect this rollout to the sender at `address`."""
        self._receivers.join(address)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int, adapters: bool = False) -> "PushReceipt | None":
        """Send the actor's weights as `version` from rank 0 to rollouts in other processes.

        With a streaming transport it returns when all rollouts have received the weights. The caller must submit their
        `receive_weights` before it waits for this call.

        Args:
            version: Version of the weights.
            adapters: Whether to send the adapters alone. Needs an earlier full push.

        Returns:
            Receipt that the rollouts need for `receive_weights`, None on other ranks.
        """
        return self._send(self._sender, version, adapters=adapters)

    @register(Dispatch.ONE_TO_ALL)
    def store_weights(self) -> "PushReceipt | None":
        """Put the actor's weights into the object store. Returns the receipt on rank 0, None elsewhere."""
        return self._send(self._make_sender("object_store", host="", num_receivers=0) if self.rank == 0 else None, 0)

    def _make_sender(self, transport: str, *, host: str, num_receivers: int) -> "Sender":
        settings, timeout_s = self.config.actor_rollout_ref.rollout.weight_sync, self.config.trainer.call_timeout_s
        return weight_transfer.make_sender(
            transport, settings, host=host, num_receivers=num_receivers, device=self.device, timeout_s=timeout_s
        )

    def _send(self, sender: "Sender | None", version: int, *, adapters: bool = False) -> "PushReceipt | None":
        with self._trained():
            policy = self.config.actor_rollout_ref
            dtypes = sent_dtypes(policy.rollout, policy.model, self.device)
            weights = weight_transfer.OutgoingWeights(self._weights_to_push(adapters), dtypes)
            try:
                return None if sender is None else sender.send(version, weights)
            finally:
                weights.drain()  # gathering is collective: also for ranks that send nothing

    @register(Dispatch.ONE_TO_ALL)
    def drop_stored_weights(self, before: int) -> None:
        """Delete weights of versions before this one that pushes through a directory left there."""
        if self.rank == 0:
            assert self._sender is not None, "only an actor that pushed has stored weights"
            self._sender.delete_older_than(before)

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(
        self, version: int, sent: "PushReceipt | None", adapters: bool = False, probe: Probe | None = None
    ) -> RolloutHealth:
        """Load weights of an actor in other processes.

        Args:
            version: Version of the weights.
            sent: Receipt of the sender. None: receive over the channel.
            adapters: Whether the adapters alone arrive.
            probe: What the rollout samples after it.

        Returns:
            The rollout's health. `received` is the fingerprint of the received weights.

        Raises:
            StaleWeightsError: The weights differ from what the actor sent. The rollout refuses to generate until the
                next push.
        """
        incoming = self._receivers.receive(version, sent)
        health = self.rollout.load_weights(version, incoming, sent=incoming.fingerprint, adapters=adapters)
        return self._with_probe(health, probe)

    @register(Dispatch.ONE_TO_ALL)
    def rollout_health(self) -> RolloutHealth:
        """Return version and fingerprint of the rollout's present weights."""
        return self.rollout.health()

    @register(Dispatch.ONE_TO_ALL)
    def rollout_sleep(self) -> None:
        """Release the rollout's memory for training. On CUDA, a rollout in the actor's process starts asleep."""
        self.rollout.sleep()

    @register(Dispatch.ONE_TO_ALL)
    def rollout_wake_up(self) -> None:
        """Allocate the rollout's memory again, before the next push."""
        self.free_cached_memory()
        self.rollout.wake_up()

    @register(Dispatch.ONE_TO_ALL)
    def free_cached_memory(self) -> None:
        """Release torch's cached unused memory, which a rollout on the same device cannot use."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
