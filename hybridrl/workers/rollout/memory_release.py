"""Memory that is given away between two phases of a step, counted and not believed.

Pages of host memory can be given back while the tensors in them stay where they are: the kernel takes them, and whoever
touches them again finds zeros. That is all a CPU rollout needs for its key-value cache, which holds nothing between two
calls.
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable

import torch

logger = logging.getLogger(__name__)

# Allocators round up, and other threads allocate meanwhile; an engine that kept its weights or its cache frees far less
# than this.
LEAST_SHARE = 0.9
MADV_DONTNEED = 4


def resident_bytes() -> int:
    """Return how much memory this process has now."""
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * mmap.PAGESIZE


def device_bytes() -> int:
    """Return how much of this process's CUDA device is in use, by whomever: memory of vLLM is not torch's."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def give_back_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Give the kernel the whole pages of CPU tensors that it has filled, their content is lost, zeros are read instead.

    Returns bytes.
    """
    num_bytes = 0
    for start, length in _pages(tensors):
        num_bytes += _filled_bytes(start, length)
        if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED) != 0:
            raise OSError(
                ctypes.get_errno(), f"the kernel did not take {length} bytes back: {os.strerror(ctypes.get_errno())}"
            )
    return num_bytes


def warn_if_kept(engine: str, *, expected: int, freed: int) -> None:
    """Log a warning that names the engine if it gave away less than it said it holds."""
    if freed < LEAST_SHARE * expected:
        logger.warning(
            "%s rollout: it went to sleep and freed %.1f MB of the %.1f MB that its weights and its cache "
            "take; training has less memory "
            "than it should. If it runs out, lower actor_rollout_ref.rollout.gpu_memory_utilization or "
            "kv_cache_memory_mb",
            engine,
            freed / 1e6,
            expected / 1e6,
        )


def _pages(tensors: Iterable[torch.Tensor]) -> set[tuple[int, int]]:
    """Return address and length of the whole pages of every storage, once."""
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
