"""Weights through memory that sender and receivers on one machine share: a live transport; the bytes are written once
and read in place.

On the CPU a slot is an anonymous file (memfd) that receivers open by the sender's process id: nothing stays behind when
a process is killed, and the size of /dev/shm does not matter. Where sender and receivers share one GPU it is device
memory, handed over by CUDA's interprocess handles, and the bytes never leave the GPU.
"""

import base64
import mmap
import os
from typing import Any

import torch

from hybridrl.errors import ConfigError
from hybridrl.workers.weight_transfer.base import KEY
from hybridrl.workers.weight_transfer.buckets import Bucket
from hybridrl.workers.weight_transfer.channel import Address, Place
from hybridrl.workers.weight_transfer.streaming import NUM_SLOTS, LiveReceiver, LiveSender, here

NAME = "shared_memory"


class SharedMemorySender(LiveSender):
    """See `LiveSender`. A receiver on another machine is a ConfigError at the first push."""

    name = NAME
    _slots: tuple["HostSlot | GpuSlot | None", ...] = (None,) * NUM_SLOTS

    def _meet(self, places: list[Place]) -> dict[str, Any]:
        self._kind = slot_kind(places, here(self._device))
        return {}

    def _slot(self, place: int, num_bytes: int) -> torch.Tensor:
        slot = self._slots[place]
        if slot is None or len(slot.data) < num_bytes:
            slots = list(self._slots)
            slots[place] = slot = self._kind(num_bytes)
            self._slots = tuple(slots)
        return slot.data

    def _offer(self, place: int) -> dict[str, Any]:
        if self._slots[place].data.is_cuda:
            torch.cuda.synchronize()
        return {"slot": place, "memory": self._slots[place].handle}

    def _go(self, place: int, bucket: Bucket) -> None:
        pass  # it is there already

    def close(self) -> None:
        self._slots = (None,) * NUM_SLOTS


class SharedMemoryReceiver(LiveReceiver):
    """See `LiveReceiver`. A slot is mapped once and stays mapped until it has grown."""

    def __init__(self, address: Address, *, rank: int, device: str):
        super().__init__(address, rank=rank, device=device)
        self._mapped: dict[int, tuple[dict[str, Any], torch.Tensor]] = {}

    def _join(self, greeting: dict[str, Any]) -> None:
        pass

    def _fetch(self, message: dict[str, Any]) -> torch.Tensor:
        place, handle = message["slot"], message["memory"]
        if place not in self._mapped or self._mapped[place][0] != handle:
            self._mapped[place] = handle, _map_gpu(handle) if "cuda" in handle else _map_host(handle)
        return self._mapped[place][1][: message["bytes"]]

    def _let_go(self) -> None:
        if any(data.is_cuda for _, data in self._mapped.values()):
            torch.cuda.synchronize()

    def close(self) -> None:
        self._mapped.clear()


class HostSlot:
    """Memory on the host: data (n,) uint8; handle says how another process maps it."""

    def __init__(self, num_bytes: int):
        self._file = os.memfd_create("hybridrl-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_bytes)
        self.data = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self.handle = {
            "file": f"/proc/{os.getpid()}/fd/{self._file}",
            "inode": os.fstat(self._file).st_ino,
            "bytes": num_bytes,
        }

    def __del__(self) -> None:
        os.close(self._file)


class GpuSlot:
    """Memory on this process's GPU."""

    def __init__(self, num_bytes: int):
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self.handle = {
            "cuda": [_encoded(part) for part in self.data.untyped_storage()._share_cuda_()],
            "bytes": num_bytes,
        }


def slot_kind(receivers: list[Place], sender: Place) -> type[HostSlot] | type[GpuSlot]:
    """Return what memory all of them share; a receiver on another machine is a ConfigError."""
    for rank, place in enumerate(receivers):
        if place.machine != sender.machine:
            raise ConfigError(
                f"{KEY}.transport={NAME}: rollout rank {rank} is on {place.machine}, actor rank 0 on {sender.machine}; "
                "use broadcast or object_store"
            )
    return GpuSlot if sender.gpu is not None and all(place.gpu == sender.gpu for place in receivers) else HostSlot


def _map_host(handle: dict[str, Any]) -> torch.Tensor:
    with open(handle["file"], "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), handle["bytes"]), dtype=torch.uint8)


def _map_gpu(handle: dict[str, Any]) -> torch.Tensor:
    _, *parts = map(
        _decoded, handle["cuda"]
    )  # the first is the device's number, which another process may count differently
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)[: handle["bytes"]]


def _encoded(part: Any) -> Any:
    return {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _decoded(part: Any) -> Any:
    return base64.b64decode(part["base64"]) if isinstance(part, dict) else part
