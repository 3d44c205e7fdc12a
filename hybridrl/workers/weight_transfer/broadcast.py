"""Weights by a collective broadcast from the trainer's rank 0 to all rollout processes: a live transport, for any
number of machines.

The group is made at the first push and kept. It stands beside those that trainer and rollout compute with: NCCL where
every process has a GPU to itself, else gloo, through host memory. Its rank 0 is the sender, rank r + 1 rollout process
r.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.workers.weight_transfer.base import Reused
from hybridrl.workers.weight_transfer.buckets import Bucket
from hybridrl.workers.weight_transfer.channel import Address, Place
from hybridrl.workers.weight_transfer.streaming import NUM_SLOTS, LiveReceiver, LiveSender, here

NAME = "broadcast"


class BroadcastSender(LiveSender):
    """See `LiveSender`."""

    name = NAME
    _group: Any = None
    _buffers: list[Reused]
    _moving: list[Any]

    def _meet(self, places: list[Place]) -> dict[str, Any]:
        if self._group is None:
            gpus = {place.gpu for place in places} | {here(self._device).gpu}
            self._backend = "nccl" if None not in gpus and len(gpus) == len(places) + 1 else "gloo"
            self._buffers = [Reused("cuda" if self._backend == "nccl" else "cpu") for _ in range(NUM_SLOTS)]
            self._moving = [None] * NUM_SLOTS
        return {"backend": self._backend}

    def _slot(self, place: int, num_bytes: int) -> torch.Tensor:
        if self._moving[place] is not None:
            self._moving[place].wait()
        return self._buffers[place](num_bytes)

    def _offer(self, place: int) -> dict[str, Any]:
        return {}

    def _go(self, place: int, bucket: Bucket) -> None:
        if self._group is None:
            self._group = make_group(self._backend, self._end.store, rank=0, address=self.address)
        self._moving[place] = self._group.broadcast(bucket.data, 0)

    def close(self) -> None:
        self._group, self._buffers, self._moving = None, [], [None] * NUM_SLOTS


class BroadcastReceiver(LiveReceiver):
    """See `LiveReceiver`."""

    _group: Any = None
    _buffer: Reused | None = None

    def _join(self, greeting: dict[str, Any]) -> None:
        self._backend = greeting["backend"]

    def _fetch(self, message: dict[str, Any]) -> torch.Tensor:
        try:
            if self._group is None:
                self._buffer = Reused("cuda" if self._backend == "nccl" else "cpu")
                self._group = make_group(
                    self._backend, self._end.store, rank=self._end.rank + 1, address=self._end.address
                )
            data = self._buffer(message["bytes"])[: message["bytes"]]
            self._group.broadcast(data, 0).wait()
        except RuntimeError as error:  # of the collective: a peer is gone or silent
            raise self._end.late("broadcast a bucket") from error
        return data

    def _let_go(self) -> None:
        pass  # the bytes are this process's own

    def close(self) -> None:
        self._group = self._buffer = None


def make_group(backend: str, store: dist.Store, *, rank: int, address: Address) -> Any:
    """Return the group of the sender and all receivers; blocks until all of them are here, or past the deadline."""
    own, size, timeout = (
        dist.PrefixStore(backend, store),
        address.num_receivers + 1,
        timedelta(seconds=address.timeout_s),
    )
    if backend == "gloo":
        return dist.ProcessGroupGloo(own, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(own, rank, size, options)
