"""Transport of weights from the trainer to rollouts in other processes: one interface (`base`), four transports.

    stored     object_store   Ray's object store; training continues, and receivers fetch later
               disk           safetensors in a directory that all machines can access; other programs can read them, too
    streaming  shared_memory  one machine; bytes are written once and read in place, and on a GPU they never leave it
               broadcast      any number of machines; a collective on a process group of its own (NCCL or gloo)

`ActorRolloutRefWorker` uses `make_sender` and `Receivers`. The setting
`actor_rollout_ref.rollout.weight_sync.transport` chooses the transport; `benchmarks/weight_sync.py` measures the cost
of each. Inside one process there is no transport: the rollout iterates over the engine's weights.
"""

from typing import Any

from hybridrl.config.schema.workers import WeightSyncConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.workers.weight_transfer import disk, object_store
from hybridrl.workers.weight_transfer.base import IncomingWeights, PushReceipt, Receiver, Sender
from hybridrl.workers.weight_transfer.broadcast import BroadcastReceiver, BroadcastSender
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights
from hybridrl.workers.weight_transfer.channel import ChannelAddress
from hybridrl.workers.weight_transfer.disk import DiskSender
from hybridrl.workers.weight_transfer.object_store import ObjectStoreSender
from hybridrl.workers.weight_transfer.shared_memory import SharedMemoryReceiver, SharedMemorySender
from hybridrl.workers.weight_transfer.streaming import StreamingReceiver, StreamingSender

__all__ = [
    "ChannelAddress",
    "IncomingWeights",
    "OutgoingWeights",
    "Receiver",
    "Receivers",
    "Sender",
    "PushReceipt",
    "make_sender",
]

STREAMING_TRANSPORTS: dict[str, tuple[type[StreamingSender], type[StreamingReceiver]]] = {
    "shared_memory": (SharedMemorySender, SharedMemoryReceiver),
    "broadcast": (BroadcastSender, BroadcastReceiver),
}


def make_sender(
    name: str, settings: WeightSyncConfig, *, host: str, num_receivers: int, device: str, timeout_s: float = 1800.0
) -> Any:
    """Return the sender of transport `name`.

    Args:
        name: a key of `STREAMING_TRANSPORTS`, "object_store" or "disk".
        settings: bucket size and directory.
        host: where a streaming sender listens; its `address` is for the receivers.
        num_receivers: of a streaming sender.
        device: "cpu" or "cuda", of this process.
        timeout_s: how long a streaming sender waits for its receivers.
    """
    size = settings.bucket_mb << 20
    if name == object_store.NAME:
        return ObjectStoreSender(bucket_bytes=size)
    if name == disk.NAME:
        return DiskSender(settings.directory, bucket_bytes=size)
    return STREAMING_TRANSPORTS[name][0](
        host=host, num_receivers=num_receivers, device=device, bucket_bytes=size, timeout_s=timeout_s
    )


class Receivers:
    """The receiving side of a rollout process, for all transports; it is in at most one channel at a time.

    rank: of this process in its group. device: where it computes. timeout_s: how long it waits for stored weights.
    """

    def __init__(self, *, rank: int, device: str, timeout_s: float):
        self._rank, self._device, self._timeout_s = rank, device, timeout_s
        self._streaming: StreamingReceiver | None = None

    def join(self, address: ChannelAddress) -> None:
        """Connect to a streaming sender, in place of an earlier one."""
        self.close()
        self._streaming = STREAMING_TRANSPORTS[address.transport][1](address, rank=self._rank, device=self._device)

    def receive(self, version: int, sent: PushReceipt | None) -> IncomingWeights:
        """Return the weights of `version` as they arrive.

        Args:
            version: of the push.
            sent: the receipt of a stored push; None receives from the streaming sender.
        """
        if sent is None:
            if self._streaming is None:
                raise StaleWeightsError(
                    f"version {version} should arrive over a channel, but this rollout has joined none; call "
                    "join_weight_channel() first"
                )
            return self._streaming.receive(version)
        return (
            object_store.receive(sent, timeout_s=self._timeout_s)
            if sent.transport == object_store.NAME
            else disk.receive(sent)
        )

    def close(self) -> None:
        """Leave the channel."""
        if self._streaming is not None:
            self._streaming.close()
        self._streaming = None
