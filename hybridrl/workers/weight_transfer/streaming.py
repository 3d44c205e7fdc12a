"""The steps of a streaming push, common to `shared_memory` and `broadcast`: rendezvous, buckets, fingerprint.

`StreamingSender` runs in the trainer's rank 0, `StreamingReceiver` in every rollout process. A transport subclasses
both and moves the bytes of a bucket; `channel` carries the messages. At most two buckets are in transit: while
receivers read one, the sender fills the other.
"""

import os
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.system.machine import shared_memory_id
from hybridrl.workers.weight_transfer import buckets
from hybridrl.workers.weight_transfer.base import IncomingWeights, PushReceipt, Receiver, Sender, SenderSetup
from hybridrl.workers.weight_transfer.channel import ChannelAddress, PeerLocation, ReceiverEnd, SenderEnd
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor

NUM_SLOTS = 2


class StreamingSender(Sender):
    """The trainer's side. It allocates two buckets."""

    address: ChannelAddress

    def __init__(self, setup: SenderSetup):
        self._end = SenderEnd(
            setup.transport, host=setup.host, num_receivers=setup.num_receivers, timeout_s=setup.timeout_s
        )
        self.address = self._end.address
        self._device, self._bucket_bytes = setup.device, setup.bucket_bytes

    @abstractmethod
    def _rendezvous(self, receivers: list[PeerLocation]) -> dict[str, Any]:
        """Prepare for receivers at these locations, by rank, and return the message that accepts them.

        Called at the beginning of every push.
        """

    @abstractmethod
    def _slot_buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        """Return the slot's memory, at least `num_bytes` large. Receivers have read its old content."""

    @abstractmethod
    def _publish(self, slot: int) -> dict[str, Any]:
        """Return the transport's part of the announcement of a full slot."""

    def _transmit(self, slot: int, bucket: buckets.Bucket) -> None:
        """Start to move the bytes, if the transport has to. The bucket has been announced."""

    def send(self, version: int, weights: buckets.OutgoingWeights) -> PushReceipt:
        """See `Sender.send`."""
        number = 0

        def buffer(num_bytes: int) -> torch.Tensor:
            if number >= NUM_SLOTS:
                self._end.wait_received(number - NUM_SLOTS)
            return self._slot_buffer(number % NUM_SLOTS, num_bytes)

        try:
            self._end.accept(self._rendezvous(self._end.start_push(version)))
            for bucket in buckets.fill_buckets(weights, num_bytes=self._bucket_bytes, buffer=buffer):
                message = {"bytes": len(bucket.data), "entries": buckets.entries_to_json(bucket.entries)}
                self._end.announce(number, message | self._publish(number % NUM_SLOTS))
                self._transmit(number % NUM_SLOTS, bucket)
                number += 1
            self._end.announce(number, {"fingerprint": weights.fingerprint})
            for last in range(max(0, number - NUM_SLOTS), number + 1):
                self._end.wait_received(last)
        except dist.DistError as error:
            timeout = self._end.timeout_error(f"received/{number}", f"receive bucket {number}")
            self._end.abort_push(number, str(timeout))
            raise timeout from error
        except BaseException as error:
            self._end.abort_push(number, f"{type(error).__name__}: {error}")
            raise
        return PushReceipt(self.address.transport, weights.fingerprint, weights.num_bytes, number)


class StreamingReceiver(Receiver):
    """A rollout's side. rank: of this process among the receivers. device: where it computes."""

    def __init__(self, address: ChannelAddress, *, rank: int, device: str):
        self._end, self._device = ReceiverEnd(address, rank=rank), device

    def _prepare(self, accepted: dict[str, Any]) -> None:
        """Prepare for a push; `accepted` is the sender's `_rendezvous` message."""

    @abstractmethod
    def _fetch(self, message: dict[str, Any]) -> torch.Tensor:
        """Return a bucket's bytes (n,) uint8, valid until the next one."""

    def _release(self) -> None:
        """Make sure that the yielded tensors have been read; the sender may overwrite them afterwards."""

    def receive(self, version: int, sent: PushReceipt | None = None) -> IncomingWeights:
        """See `Receiver.receive`."""
        trailer: dict[str, Any] = {}
        return IncomingWeights(self._tensors(version, trailer), fingerprint=lambda: trailer["fingerprint"])

    def _tensors(self, version: int, trailer: dict[str, Any]) -> Iterator[NamedTensor]:
        self._prepare(self._end.start_push(version, own_location(self._device)))
        number = 0
        while "fingerprint" not in trailer:
            message = self._end.next_message(number)
            if "fingerprint" in message:
                trailer["fingerprint"] = message["fingerprint"]
            else:
                yield from buckets.unpack(
                    buckets.Bucket(buckets.entries_from_json(message["entries"]), self._fetch(message))
                )
                self._release()
            self._end.report_received(number)
            number += 1


def own_location(device: str) -> PeerLocation:
    """Return the location of this process."""
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else None
    return PeerLocation(machine=shared_memory_id(), process=os.getpid(), gpu=gpu)
