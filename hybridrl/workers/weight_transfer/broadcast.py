"""A streaming transport: collective broadcast from the trainer's rank 0 to all rollout processes, on any machines.

The process group is created at the first push and kept. It is separate from the groups that trainer and rollout compute
with: NCCL if every process has a GPU of its own, else gloo, through host memory. The sender is its rank 0, and rollout
process r its rank r + 1.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.config.capabilities import TransportCapabilities
from hybridrl.workers.weight_transfer.base import GrowableBuffer, ReceiverSetup, SenderSetup, Transport
from hybridrl.workers.weight_transfer.buckets import Bucket
from hybridrl.workers.weight_transfer.channel import ChannelAddress, PeerLocation
from hybridrl.workers.weight_transfer.streaming import NUM_SLOTS, StreamingReceiver, StreamingSender, own_location


class BroadcastSender(StreamingSender):
    """See `StreamingSender`."""

    _group: Any = None
    _buffers: list[GrowableBuffer]
    _in_flight: list[Any]

    def _rendezvous(self, receivers: list[PeerLocation]) -> dict[str, Any]:
        if self._group is None:
            gpus = {receiver.gpu for receiver in receivers} | {own_location(self._device).gpu}
            self._backend = "nccl" if None not in gpus and len(gpus) == len(receivers) + 1 else "gloo"
            self._buffers = [GrowableBuffer("cuda" if self._backend == "nccl" else "cpu") for _ in range(NUM_SLOTS)]
            self._in_flight = [None] * NUM_SLOTS
        return {"backend": self._backend}

    def _slot_buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        if self._in_flight[slot] is not None:
            self._in_flight[slot].wait()
        return self._buffers[slot](num_bytes)

    def _publish(self, slot: int) -> dict[str, Any]:
        return {}

    def _transmit(self, slot: int, bucket: Bucket) -> None:
        if self._group is None:
            self._group = make_group(self._backend, self._end.store, rank=0, address=self.address)
        self._in_flight[slot] = self._group.broadcast(bucket.data, 0)

    def close(self) -> None:
        self._group, self._buffers, self._in_flight = None, [], [None] * NUM_SLOTS


class BroadcastReceiver(StreamingReceiver):
    """See `StreamingReceiver`."""

    _group: Any = None
    _buffer: GrowableBuffer | None = None

    def _prepare(self, accepted: dict[str, Any]) -> None:
        self._backend = accepted["backend"]

    def _fetch(self, message: dict[str, Any]) -> torch.Tensor:
        try:
            if self._group is None or self._buffer is None:
                self._buffer = GrowableBuffer("cuda" if self._backend == "nccl" else "cpu")
                self._group = make_group(
                    self._backend, self._end.store, rank=self._end.rank + 1, address=self._end.address
                )
            data = self._buffer(message["bytes"])[: message["bytes"]]
            self._group.broadcast(data, 0).wait()
        except RuntimeError as error:  # of the collective: a peer is gone or silent
            raise self._end.timeout_error("broadcast a bucket") from error
        return data

    def close(self) -> None:
        self._group = self._buffer = None


class BroadcastTransport(Transport):
    """See the module."""

    capabilities = TransportCapabilities(streaming=True)

    @staticmethod
    def make_sender(setup: SenderSetup) -> BroadcastSender:
        return BroadcastSender(setup)

    @staticmethod
    def make_receiver(setup: ReceiverSetup, address: ChannelAddress) -> BroadcastReceiver:
        return BroadcastReceiver(address, rank=setup.rank, device=setup.device)


def make_group(backend: str, store: dist.Store, *, rank: int, address: ChannelAddress) -> Any:
    """Return the group of the sender and all receivers.

    Blocks until all have joined or the deadline passes.
    """
    own_store = dist.PrefixStore(backend, store)
    size, timeout = address.num_receivers + 1, timedelta(seconds=address.timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(own_store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(own_store, rank, size, options)
