"""The transport interface: a sender beside the training engine, and a receiver beside each rollout.

There are two kinds of transport:

  - *Stored* (`object_store`, `disk`): the sender stores the weights, returns a receipt and continues at once. A
    receiver fetches them later.
  - *Streaming* (`shared_memory`, `broadcast`): sender and receivers process the same buckets at the same time, over a
    channel opened before. Nothing is stored. Early processes wait for late ones, up to a deadline.

A `Transport` says which kind it is, and makes senders and receivers. Both kinds deliver the fingerprint of what was
sent after the last tensor. `Rollout.load_weights` compares it with the weights it loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from hybridrl.config.capabilities import TransportCapabilities as TransportCapabilities
from hybridrl.workers.weight_transfer.buckets import Bucket, OutgoingWeights, fill_buckets
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor

KEY = "actor_rollout_ref.rollout.weight_sync"


@dataclass(frozen=True)
class PushReceipt:
    """The result of sending a push. stored: where a stored transport put the weights; None for a streaming one."""

    transport: str
    fingerprint: int
    num_bytes: int
    num_buckets: int
    stored: Any = None


@dataclass(frozen=True)
class SenderSetup:
    """What a sender needs to start.

    transport: the value of the setting; receipts and addresses carry it, so that receivers find the same transport.
    bucket_bytes: size of a bucket. directory: of a transport that needs one.
    host: where a streaming sender listens. num_receivers: of a streaming sender.
    device: "cpu" or "cuda", of this process. timeout_s: how long a streaming sender waits for its receivers.
    """

    transport: str
    bucket_bytes: int
    directory: str | None = None
    host: str = ""
    num_receivers: int = 0
    device: str = "cpu"
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class ReceiverSetup:
    """What a receiver needs to start.

    rank: of this process in its group. device: where it computes. timeout_s: how long it waits for stored weights.
    """

    rank: int
    device: str
    timeout_s: float


class SenderAddress(Protocol):
    """Where receivers find a streaming sender; travels between processes."""

    @property
    def transport(self) -> str:
        """The sender's `SenderSetup.transport`."""

    def cancel(self, reason: str) -> None:
        """End the sender's wait for its receivers with a StaleWeightsError of this reason; the driver calls it."""


class Sender(ABC):
    """The trainer's side of a transport, in the process of rank 0.

    address: of a streaming sender, complete when the sender exists. None: the transport is stored.
    """

    address: SenderAddress | None = None

    @abstractmethod
    def send(self, version: int, weights: OutgoingWeights) -> PushReceipt:
        """Send all of `weights` as `version`. A streaming sender returns when every receiver has received them.

        After an error the sender must not be used again.

        Raises:
            CallTimeout: a receiver of a streaming sender was too late; the error names it.
        """

    def delete_older_than(self, before: int) -> None:  # noqa: B027 - optional
        """Delete stored versions below `before`, if they do not go by themselves."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release what the sender holds."""


class Receiver(ABC):
    """A rollout's side of a transport."""

    @abstractmethod
    def receive(self, version: int, sent: PushReceipt | None) -> "IncomingWeights":
        """Return the weights of `version` as they arrive. Iterating raises CallTimeout if they are late.

        Args:
            version: of the push.
            sent: the sender's receipt with a stored transport; None with a streaming one.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Release what the receiver holds."""


class StoredReceiver(Receiver):
    """A rollout's side of a stored transport: the receipt says where the weights are."""

    @abstractmethod
    def tensors(self, sent: PushReceipt) -> Iterator[NamedTensor]:
        """Yield the weights of a push."""

    def receive(self, version: int, sent: PushReceipt | None) -> "IncomingWeights":
        """See `Receiver.receive`."""
        if sent is None:
            raise ValueError(f"the weights of version {version} are stored; give the receipt of their push")
        return IncomingWeights(self.tensors(sent), fingerprint=lambda: sent.fingerprint)


class Transport(ABC):
    """One way for a push to travel; `actor_rollout_ref.rollout.weight_sync.transport` names it.

    capabilities: whether it is streaming or stored. `hybridrl.testing.check_transport` tests a subclass.
    """

    capabilities: ClassVar[TransportCapabilities]

    @staticmethod
    @abstractmethod
    def make_sender(setup: SenderSetup) -> Sender:
        """Return a sender; called in rank 0 of the actor."""

    @staticmethod
    @abstractmethod
    def make_receiver(setup: ReceiverSetup, address: Any) -> Receiver:
        """Return a receiver; called in every rollout process.

        Args:
            setup: Of this process.
            address: The sender's, with a streaming transport; None with a stored one.
        """


class IncomingWeights:
    """Weights as they arrive. Iterate once over (name, tensor), then call `fingerprint`.

    A tensor is valid only until the next one is requested.
    """

    def __init__(self, tensors: Iterator[NamedTensor], *, fingerprint: Callable[[], int]):
        self._tensors, self._fingerprint = tensors, fingerprint

    def __iter__(self) -> Iterator[NamedTensor]:
        return self._tensors

    def fingerprint(self) -> int:
        """Return the fingerprint of what was sent; available after the last tensor."""
        return self._fingerprint()


class GrowableBuffer:
    """One reusable buffer that grows to the largest requested size."""

    def __init__(self, device: str = "cpu"):
        self._device = device
        self._data = torch.empty(0, dtype=torch.uint8)

    def __call__(self, num_bytes: int) -> torch.Tensor:
        if len(self._data) < num_bytes:
            self._data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._data


def store_buckets(weights: OutgoingWeights, *, num_bytes: int, store: Callable[[int, Bucket], Any]) -> list[Any]:
    """Call `store(number, bucket)` for each bucket in turn and return the results."""
    buckets: Iterable[Bucket] = fill_buckets(weights, num_bytes=num_bytes, buffer=GrowableBuffer())
    return [store(number, bucket) for number, bucket in enumerate(buckets)]
