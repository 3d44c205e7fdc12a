"""A streaming transport through shared memory on one machine: bytes are written once and read in place.

On the CPU a slot is an anonymous file (memfd) that receivers open through the sender's process id. Nothing remains when
a process is killed, and the size of /dev/shm does not matter. If sender and receivers share one GPU, a slot is device
memory, passed by CUDA interprocess handles, and the bytes never leave the GPU.
"""

import base64
import mmap
import os
from typing import Any

import torch

from hybridrl.config.capabilities import TransportCapabilities
from hybridrl.errors import ConfigError
from hybridrl.workers.weight_transfer.base import KEY, ReceiverSetup, SenderSetup, Transport
from hybridrl.workers.weight_transfer.channel import ChannelAddress, PeerLocation
from hybridrl.workers.weight_transfer.streaming import NUM_SLOTS, StreamingReceiver, StreamingSender, own_location

NAME = "shared_memory"


class SharedMemorySender(StreamingSender):
    """See `StreamingSender`. Raises ConfigError at the first push if a receiver is on another machine."""

    _slots: tuple["HostSlot | GpuSlot | None", ...] = (None,) * NUM_SLOTS

    def _rendezvous(self, receivers: list[PeerLocation]) -> dict[str, Any]:
        self._slot_class = slot_class(receivers, own_location(self._device))
        return {}

    def _slot_buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        memory = self._slots[slot]
        if memory is None or len(memory.data) < num_bytes:
            slots = list(self._slots)
            slots[slot] = memory = self._slot_class(num_bytes)
            self._slots = tuple(slots)
        return memory.data

    def _publish(self, slot: int) -> dict[str, Any]:
        memory = self._slots[slot]
        assert memory is not None, "a slot is published after `_slot_buffer` made it"
        if memory.data.is_cuda:
            torch.cuda.synchronize()
        return {"slot": slot, "memory": memory.handle}

    def close(self) -> None:
        self._slots = (None,) * NUM_SLOTS


class SharedMemoryReceiver(StreamingReceiver):
    """See `StreamingReceiver`. A slot stays mapped until the sender replaces it by a larger one."""

    def __init__(self, address: ChannelAddress, *, rank: int, device: str):
        super().__init__(address, rank=rank, device=device)
        self._mapped: dict[int, tuple[dict[str, Any], torch.Tensor]] = {}

    def _fetch(self, message: dict[str, Any]) -> torch.Tensor:
        slot, handle = message["slot"], message["memory"]
        if slot not in self._mapped or self._mapped[slot][0] != handle:
            self._mapped[slot] = handle, _map_gpu(handle) if "cuda" in handle else _map_host(handle)
        return self._mapped[slot][1][: message["bytes"]]

    def _release(self) -> None:
        if any(data.is_cuda for _, data in self._mapped.values()):
            torch.cuda.synchronize()

    def close(self) -> None:
        self._mapped.clear()


class SharedMemoryTransport(Transport):
    """See the module."""

    capabilities = TransportCapabilities(streaming=True)

    @staticmethod
    def make_sender(setup: SenderSetup) -> SharedMemorySender:
        return SharedMemorySender(setup)

    @staticmethod
    def make_receiver(setup: ReceiverSetup, address: ChannelAddress) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(address, rank=setup.rank, device=setup.device)


class HostSlot:
    """Host memory. data: (n,) uint8. handle: how another process maps it."""

    def __init__(self, num_bytes: int):
        self._file = os.memfd_create("hybridrl-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_bytes)
        self.data = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self.handle = {
            "process": os.getpid(),
            "descriptor": self._file,
            "inode": os.fstat(self._file).st_ino,
            "bytes": num_bytes,
        }

    def __del__(self) -> None:
        os.close(self._file)


class GpuSlot:
    """Memory on this process's GPU; attributes as in `HostSlot`."""

    def __init__(self, num_bytes: int):
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self.handle = {
            "cuda": [_encoded(part) for part in self.data.untyped_storage()._share_cuda_()],
            "bytes": num_bytes,
        }


def slot_class(receivers: list[PeerLocation], sender: PeerLocation) -> type[HostSlot] | type[GpuSlot]:
    """Return the class of memory that all of them share.

    Raises ConfigError for a receiver on another machine.
    """
    for rank, receiver in enumerate(receivers):
        if receiver.machine != sender.machine:
            raise ConfigError(
                f"{KEY}.transport={NAME}: rollout rank {rank} is on {receiver.machine}, actor rank 0 on "
                f"{sender.machine}; use broadcast or object_store"
            )
    share_gpu = sender.gpu is not None and all(receiver.gpu == sender.gpu for receiver in receivers)
    return GpuSlot if share_gpu else HostSlot


def _map_host(handle: dict[str, Any]) -> torch.Tensor:
    with open(f"/proc/{int(handle['process'])}/fd/{int(handle['descriptor'])}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), handle["bytes"]), dtype=torch.uint8)


def _map_gpu(handle: dict[str, Any]) -> torch.Tensor:
    _, *parts = map(_decoded, handle["cuda"])  # the first is the device index, which may differ between processes
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)[: handle["bytes"]]


def _encoded(part: Any) -> Any:
    return {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _decoded(part: Any) -> Any:
    return base64.b64decode(part["base64"]) if isinstance(part, dict) else part
