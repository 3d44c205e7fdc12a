"""This machine as a device to plan for: cores, memory, bfloat16, and measured speeds.

`hybridrl plan`, `train` and `doctor` ask. Memory and cores are those that a container may use.
"""

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from hybridrl.system.machine import bfloat16_instructions, memory_bytes
from hybridrl.workers.engine.utilization.matmul_peak import matmul_peak

GIB = 2**30
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
COPIED_BYTES = 128 << 20
REPEATS = 3


@dataclass(frozen=True)
class ThisMachine:
    """What a job on this machine may use.

    Attributes:
        device: "cuda" or "cpu".
        name: Of one device, for people.
        memory: Bytes of one device.
        cores: CPU cores.
        gpus: Number of GPUs.
        bfloat16: The CPU's instructions for products in bfloat16; "" without them.
    """

    device: str
    name: str
    memory: float
    cores: int
    gpus: int
    bfloat16: str

    def __str__(self) -> str:
        if self.gpus:
            return f"this machine: {self.gpus} x {self.name}, {self.memory / GIB:.0f} GiB each"
        fast = f", bfloat16 by {self.bfloat16}" if self.bfloat16 else ""
        return f"this machine: {self.cores} CPU cores, {self.memory / GIB:.0f} GiB{fast}"


def this_machine() -> ThisMachine:
    """Return what this machine has."""
    import torch

    cores, bfloat16 = _cores(), bfloat16_instructions()
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return ThisMachine("cuda", found.name, found.total_memory, cores, torch.cuda.device_count(), bfloat16)
    return ThisMachine("cpu", "CPU", memory_bytes(), cores, 0, bfloat16)


def _cores() -> int:
    """Return the cores that a process here may use, rounded up."""
    found = len(os.sched_getaffinity(0))
    quota, _, period = (CGROUP_QUOTA.read_text() if CGROUP_QUOTA.exists() else "max 1").partition(" ")
    return min(found, max(1, -(-int(quota) // int(period)))) if quota.isdigit() else found


def product_speed(device: str, dtype: str) -> float:
    """Return the FLOPs per second of large products on this machine, measured once."""
    import torch

    return matmul_peak(device, getattr(torch, dtype))


@functools.cache
def copy_bandwidth(device: str) -> float:
    """Return the bytes per second that a copy reads and writes."""
    import torch

    source = torch.ones(COPIED_BYTES // 4, device=device)
    target, taken = torch.empty_like(source), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 2 * COPIED_BYTES / min(taken)
