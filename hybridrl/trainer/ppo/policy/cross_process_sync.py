"""`CrossProcessWeightSync`: pushes of the actor's weights to a rollout in processes of its own.

The driver submits a send to rank 0 of the actor and a receive to every rollout process, and moves no bytes. Calls to a
process execute in submission order. The bytes travel through `workers/weight_transfer`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.trainer.ppo.policy.generator import Pending
from hybridrl.trainer.ppo.policy.weight_sync import PendingPush, Probing, Turn, at_once, probe_of
from hybridrl.workers.weight_transfer.transports import transport_capabilities


class CrossProcessWeightSync:
    """Pushes between an actor and a rollout in separate processes.

    With weight_sync.lora=adapter, a channel carries only the adapters after its first full push.

    Args:
        actor: Worker group of the actor.
        rollout: Worker group of the rollout.
        settings: Settings `actor_rollout_ref.rollout.weight_sync`.
        overlaps_training: Whether the rollout generates while the actor trains; training must not wait for it then.
    """

    def __init__(self, actor: Any, rollout: Any, settings: WeightSyncConfig, *, overlaps_training: bool):
        self._actor, self._rollout, self._settings = actor, rollout, settings
        self._overlaps_training = overlaps_training
        self._transport: str | None = None  # None: to be chosen and opened by the next push
        self._version: int | None = None  # of the last push that was started
        self._loaded: tuple[int, Any] | None = None  # version and receipt of the weights that the rollout loaded last
        self.address: Any = None

    def push(self, version: int, turn: Turn = at_once, probing: Probing | None = None) -> Pending:
        """Start a push; the rollout receives in its turn. Opens a channel first if there is none."""
        adapters = self._settings.lora == "adapter" and self._transport is not None
        if self._transport is None:
            self._transport = self._open()
        self._version = version
        sent = self._actor.send_weights.submit(version, adapters)
        receipt = sent[0] if self.address is None else None  # a streaming transport has an address

        def receive() -> PendingPush:
            health = self._rollout.receive_weights.submit(version, receipt, adapters, *probe_of(probing))
            after = partial(self._after, receipt)
            return PendingPush(self._rollout, health, version, after=after, sent=sent, probing=probing)

        return turn(version, receive)

    @property
    def resend(self) -> Callable[[Sequence[int]], None] | None:
        settings = self._settings
        keeps_all = settings.by_placement or transport_capabilities(settings.transport).stored
        is_possible = not self._overlaps_training or (keeps_all and settings.lora == "merged")
        return self._resend if is_possible else None

    def _resend(self, ranks: Sequence[int]) -> None:
        """Send the other ranks' weights to restarted rollout processes, those of one engine."""
        if self._overlaps_training:  # the actor may have newer weights
            assert self._loaded is not None, "a rollout serves requests only after its first push"
            self._rollout.execute_ranks(ranks, "receive_weights", *self._loaded)
            return
        self._rollout.execute_ranks(ranks, "receive_weights", self._version, self._actor.store_weights.submit()[0])
        self.reset()

    def cancel(self, reason: str) -> None:
        if self.address is not None:
            self.address.cancel(reason)

    def reset(self) -> None:
        self._transport = None

    def _open(self) -> str:
        transport = self._settings.transport
        if self._settings.by_placement:
            transport = self._choose()
        self.address = self._actor.open_weight_channel(transport, self._rollout.world_size)[0]
        if self.address is not None:
            self._rollout.join_weight_channel(self.address)
        return transport

    def _choose(self) -> str:
        """Return the object store if the rollout may be busy, else the fastest transport between the machines."""
        if self._overlaps_training:
            return "object_store"
        machines = {*self._actor.machine_id(), *self._rollout.machine_id()}
        return "shared_memory" if len(machines) == 1 else "broadcast"

    def _after(self, receipt: Any, version: int, error: BaseException | None) -> None:
        if error is not None:
            self.cancel(f"the push of version {version} has failed")
            self._transport = None
            return
        self._loaded = version, receipt
        if self._settings.directory is not None:
            self._actor.drop_stored_weights.submit(version)
