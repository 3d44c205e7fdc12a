"""The course of a live push, the same for shared memory and broadcast: meet, bucket after bucket, the fingerprint at
the end.

A transport adds how the bytes of a bucket get across. Two buckets are on their way at most: while receivers take one,
the sender fills the other.
"""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.workers.weight_transfer.base import Incoming, Sent
from hybridrl.workers.weight_transfer.buckets import (
    Bucket,
    Outgoing,
    entries_from_json,
    entries_to_json,
    fill_buckets,
    unpack,
)
from hybridrl.workers.weight_transfer.channel import Address, Place, ReceiverEnd, SenderEnd
from hybridrl.workers.weight_transfer.fingerprint import Named

NUM_SLOTS = 2


class LiveSender(ABC):
    """The trainer's side.

    host: this machine's address. device: "cpu" or "cuda". bucket_bytes: of each of the two buckets.
    """

    name: str

    def __init__(self, *, host: str, num_receivers: int, device: str, bucket_bytes: int, timeout_s: float):
        self._end = SenderEnd(self.name, host=host, num_receivers=num_receivers, timeout_s=timeout_s)
        self.address = self._end.address
        self._device, self._bucket_bytes = device, bucket_bytes

    @abstractmethod
    def _meet(self, places: list[Place]) -> dict[str, Any]:
        """Prepare for receivers at these places, by rank, and return what they are told.

        Called at the beginning of every push.
        """

    @abstractmethod
    def _slot(self, place: int, num_bytes: int) -> torch.Tensor:
        """Return slot `place`'s memory, at least so large. Receivers have taken what was in it."""

    @abstractmethod
    def _offer(self, place: int) -> dict[str, Any]:
        """Slot `place` is full: return what receivers are told about it."""

    @abstractmethod
    def _go(self, place: int, bucket: Bucket) -> None:
        """Receivers have been told: begin to move the bytes, if they have to be moved."""

    def send(self, version: int, weights: Outgoing) -> Sent:
        number = 0

        def slot(num_bytes: int) -> torch.Tensor:
            if number >= NUM_SLOTS:
                self._end.wait_taken(number - NUM_SLOTS)
            return self._slot(number % NUM_SLOTS, num_bytes)

        try:
            self._end.greet(self._meet(self._end.begin(version)))
            for bucket in fill_buckets(weights, num_bytes=self._bucket_bytes, buffer=slot):
                about = {"bytes": len(bucket.data), "entries": entries_to_json(bucket.entries)}
                self._end.announce(number, about | self._offer(number % NUM_SLOTS))
                self._go(number % NUM_SLOTS, bucket)
                number += 1
            self._end.announce(number, {"fingerprint": weights.fingerprint})
            for last in range(max(0, number - NUM_SLOTS), number + 1):
                self._end.wait_taken(last)
        except dist.DistError as error:
            late = self._end.late(f"taken/{number}", f"take bucket {number}")
            self._end.give_up(number, str(late))
            raise late from error
        except BaseException as error:
            self._end.give_up(number, f"{type(error).__name__}: {error}")
            raise
        return Sent(self.name, weights.fingerprint, weights.num_bytes, number)

    @abstractmethod
    def close(self) -> None:
        """Give the slots back."""


class LiveReceiver(ABC):
    """A rollout's side. rank: of this process among the receivers. device: where it computes."""

    def __init__(self, address: Address, *, rank: int, device: str):
        self._end, self._device = ReceiverEnd(address, rank=rank), device

    @abstractmethod
    def _join(self, greeting: dict[str, Any]) -> None:
        """Prepare for what `_meet` told."""

    @abstractmethod
    def _fetch(self, message: dict[str, Any]) -> torch.Tensor:
        """Return a bucket's bytes (n,) uint8, valid until the next."""

    @abstractmethod
    def _let_go(self) -> None:
        """What was yielded has been read; make sure of it before the sender writes there again."""

    def receive(self, version: int) -> Incoming:
        told: dict[str, Any] = {}
        return Incoming(self._tensors(version, told), fingerprint=lambda: told["fingerprint"])

    def _tensors(self, version: int, told: dict[str, Any]) -> Iterator[Named]:
        self._join(self._end.begin(version, here(self._device)))
        number = 0
        while "fingerprint" not in told:
            message = self._end.listen(number)
            if "fingerprint" in message:
                told["fingerprint"] = message["fingerprint"]
            else:
                yield from unpack(Bucket(entries_from_json(message["entries"]), self._fetch(message)))
                self._let_go()
            self._end.took(number)
            number += 1

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""


def here(device: str) -> Place:
    """Return where this process is."""
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else None
    return Place(machine=this_machine(), process=os.getpid(), gpu=gpu)


def this_machine() -> str:
    """Return a name that only processes have in common that can share memory: same kernel, same file system of memory.

    Containers on different machines may have the same host name, and those on one machine a /dev/shm each.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f"{socket.gethostname()} ({f.read()[:8]}-{os.stat('/dev/shm').st_dev})"
    except FileNotFoundError:  # not Linux
        return socket.gethostname()
