"""The transport interface: a sender beside the training engine, and a receiver beside each rollout.

There are two kinds of transport:

  - *Stored* (`object_store`, `disk`): the sender stores the weights, returns a receipt and continues at once. A
    receiver fetches them later.
  - *Streaming* (`shared_memory`, `broadcast`): sender and receivers process the same buckets at the same time, over a
    channel opened before. Nothing is stored. Early processes wait for late ones, up to a deadline.

Both deliver the fingerprint of what was sent after the last tensor. `Rollout.load_weights` compares it with the weights
it loaded.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybridrl.workers.weight_transfer.buckets import Bucket, OutgoingWeights, fill_buckets
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor

KEY = "actor_rollout_ref.rollout.weight_sync"


@dataclass(frozen=True)
class PushReceipt:
    """The result of sending a push. parts: where a stored transport put the weights; None for a streaming one."""

    transport: str
    fingerprint: int
    num_bytes: int
    num_buckets: int
    parts: Any = None


class Sender(Protocol):
    """The trainer's side of a transport, in the process of rank 0."""

    def send(self, version: int, weights: OutgoingWeights) -> PushReceipt:
        """Send all of `weights` as `version`. A streaming sender returns when every receiver has received them.

        After an error the sender must not be used again.

        Raises:
            CallTimeout: a receiver of a streaming sender was too late; the error names it.
        """

    def close(self) -> None:
        """Release what the sender holds."""


class Receiver(Protocol):
    """A rollout's side of a streaming transport."""

    def receive(self, version: int) -> "IncomingWeights":
        """Return the weights of `version` as they arrive. Iterating raises CallTimeout if they are late."""

    def close(self) -> None:
        """Release what the receiver holds."""


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
