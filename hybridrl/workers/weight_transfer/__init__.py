"""How weights get from a trainer to rollouts in other processes: one seam (`base`), four ways through it.

    stored   object_store   Ray's object store; the trainer goes on, receivers fetch when they have time
             disk           safetensors in a directory that all machines see; other programs can read them, too
    live     shared_memory  one machine; the bytes are written once and read in place, on a GPU they never leave it
             broadcast      any number of machines; a collective of its own (NCCL or gloo)

`make_sender` and `Receivers` are what the worker uses. Inside one process there is nothing to transport: the rollout
iterates over the engine's weights. `actor_rollout_ref.rollout.weight_sync.transport` says which,
`benchmarks/weight_sync.py` what each costs.
"""

from typing import Any

from hybridrl.config.schema.workers import WeightSyncConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.workers.weight_transfer import disk, object_store
from hybridrl.workers.weight_transfer.base import Incoming, Receiver, Sender, Sent
from hybridrl.workers.weight_transfer.broadcast import BroadcastReceiver, BroadcastSender
from hybridrl.workers.weight_transfer.buckets import Outgoing
from hybridrl.workers.weight_transfer.channel import Address
from hybridrl.workers.weight_transfer.disk import DiskSender
from hybridrl.workers.weight_transfer.object_store import ObjectStoreSender
from hybridrl.workers.weight_transfer.shared_memory import SharedMemoryReceiver, SharedMemorySender
from hybridrl.workers.weight_transfer.streaming import LiveReceiver, LiveSender, this_machine

__all__ = ["Address", "Incoming", "Outgoing", "Receiver", "Receivers", "Sender", "Sent", "make_sender", "this_machine"]

LIVE: dict[str, tuple[type[LiveSender], type[LiveReceiver]]] = {
    "shared_memory": (SharedMemorySender, SharedMemoryReceiver),
    "broadcast": (BroadcastSender, BroadcastReceiver),
}


def make_sender(
    name: str, settings: WeightSyncConfig, *, host: str, num_receivers: int, device: str, timeout_s: float = 1800.0
) -> Any:
    """Return the sender of transport `name`.

    A live one has an `address` that its receivers connect to; `host` is where it listens. timeout_s: how long it waits
    for them.
    """
    size = settings.bucket_mb << 20
    if name == object_store.NAME:
        return ObjectStoreSender(bucket_bytes=size)
    if name == disk.NAME:
        return DiskSender(settings.directory, bucket_bytes=size)
    return LIVE[name][0](host=host, num_receivers=num_receivers, device=device, bucket_bytes=size, timeout_s=timeout_s)


class Receivers:
    """What a rollout process receives with: the channel it joined, if any, and whatever was stored for it.

    rank: of this process in its group. device: where it computes. timeout_s: how long it waits for the sender.
    """

    def __init__(self, *, rank: int, device: str, timeout_s: float):
        self._rank, self._device, self._timeout_s = rank, device, timeout_s
        self._live: LiveReceiver | None = None

    def join(self, address: Address) -> None:
        """Connect to a live sender, instead of the one connected to before."""
        self.close()
        self._live = LIVE[address.transport][1](address, rank=self._rank, device=self._device)

    def receive(self, version: int, sent: Sent | None) -> Incoming:
        """Return the weights of `version` as they arrive: from where `sent` says, or (None) from the live sender."""
        if sent is None:
            if self._live is None:
                raise StaleWeightsError(
                    f"version {version} is to come over a channel, but this rollout was never told to join one"
                )
            return self._live.receive(version)
        return (
            object_store.receive(sent, timeout_s=self._timeout_s)
            if sent.transport == object_store.NAME
            else disk.receive(sent)
        )

    def close(self) -> None:
        """Leave the channel."""
        if self._live is not None:
            self._live.close()
        self._live = None
