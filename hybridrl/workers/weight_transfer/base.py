"""What every transport of weights is: a sender beside the training engine, a receiver beside each rollout.

Two kinds. *Stored* (`object_store`, `disk`): the sender leaves the weights somewhere and returns where; who wants them
fetches them when it has time, and the sender goes on at once. *Live* (`shared_memory`, `broadcast`): sender and
receivers work on the same buckets at the same time, over a `Channel` that both opened before; nothing is stored, and
whoever comes first waits for the others, up to a deadline.

Either way what arrives ends with the fingerprint of what was sent, and `Rollout.load_weights` compares it with what it
holds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybridrl.workers.weight_transfer.buckets import Bucket, Outgoing, fill_buckets
from hybridrl.workers.weight_transfer.fingerprint import Named

KEY = "actor_rollout_ref.rollout.weight_sync"


@dataclass(frozen=True)
class Sent:
    """What a push put on its way. parts: where a stored transport left them, None for a live one."""

    transport: str
    fingerprint: int
    num_bytes: int
    num_buckets: int
    parts: Any = None


class Sender(Protocol):
    """The trainer's side of a transport; one process (rank 0) has it."""

    def send(self, version: int, weights: Outgoing) -> Sent:
        """Put all of `weights` on their way as `version`. A live sender returns when every receiver has taken them.

        Raises CallTimeout naming the receivers that did not in time; after an error the sender is not used again.
        """

    def close(self) -> None:
        """Give back what it holds."""


class Receiver(Protocol):
    """A rollout's side of a live transport."""

    def receive(self, version: int) -> "Incoming":
        """Return the weights of `version` as they arrive.

        Raises CallTimeout while iterating when they do not in time.
        """

    def close(self) -> None:
        """Give back what it holds."""


class Incoming:
    """Weights as they arrive: iterate once over (name, tensor), each valid until the next is asked for, then ask for
    `fingerprint`.
    """

    def __init__(self, tensors: Iterator[Named], *, fingerprint: Callable[[], int]):
        self._tensors, self._fingerprint = tensors, fingerprint

    def __iter__(self) -> Iterator[Named]:
        return self._tensors

    def fingerprint(self) -> int:
        """Return the fingerprint of what was sent, known when everything has arrived."""
        return self._fingerprint()


class Reused:
    """One buffer that grows to the largest size asked for."""

    def __init__(self, device: str = "cpu"):
        self._device = device
        self._data = torch.empty(0, dtype=torch.uint8)

    def __call__(self, num_bytes: int) -> torch.Tensor:
        if len(self._data) < num_bytes:
            self._data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._data


def store_buckets(weights: Outgoing, *, num_bytes: int, store: Callable[[int, Bucket], Any]) -> list[Any]:
    """Call `store(number, bucket)` with every bucket in turn, and return its answers."""
    buckets: Iterable[Bucket] = fill_buckets(weights, num_bytes=num_bytes, buffer=Reused())
    return [store(number, bucket) for number, bucket in enumerate(buckets)]
