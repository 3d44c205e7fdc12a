"""Release rollout memory between phases, and measure what was actually released.

A rollout's `sleep` calls this in its worker process. Host pages can be released while their tensors stay in place: the
kernel takes the pages, and the next access reads zeros. This suffices for a CPU rollout's key-value cache, which holds
nothing between two calls.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch

MADV_DONTNEED = 4


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * mmap.PAGESIZE


def device_bytes() -> int:
    """Return how much of this process's CUDA device is in use, by all processes.

    torch's own count would miss vLLM's memory.
    """
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def release_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Release the host pages of CPU tensors; return the resident bytes released.

    Only whole pages are released to the kernel.

    The content is lost: the tensors read as zeros afterwards.
    """
    num_bytes = 0
    for start, length in _pages(tensors):
        num_bytes += _filled_bytes(start, length)
        if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED) != 0:
            raise OSError(
                ctypes.get_errno(), f"the kernel did not take {length} bytes back: {os.strerror(ctypes.get_errno())}"
            )
    return num_bytes


def _pages(tensors: Iterable[torch.Tensor]) -> set[tuple[int, int]]:
    """Return address and length of the whole pages of every storage, each once."""
    found = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            found.add((start, end - start))
    return found


def _filled_bytes(start: int, length: int) -> int:
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    if _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
