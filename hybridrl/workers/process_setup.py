"""Set up a worker process: resolve its device, limit its threads, keep its memory, join its process group.

Workers call it in `init_model`. Also has the sums over the ranks of that group.
"""

import ctypes
import datetime
import math
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hybridrl.errors import ConfigError
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S
from hybridrl.single_controller.monitoring.process import PROCESS
from hybridrl.single_controller.worker import PROCESS_GROUP_SIZE
from hybridrl.system.rendezvous import take_listener

# A collective, in which a rank waits for its peers, ends after so many times the deadline of a call (table in
# docs/failover.md). So the driver ends the call first, also one that it awaits after another call.
COLLECTIVE_PER_CALL = 2

ALLOCATOR_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""The user's own choice for glibc's allocator."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def init_worker_process(
    *, device: str, num_threads: int | None, single_process: bool = False, call_timeout_s: float = DEFAULT_TIMEOUT_S
) -> str:
    """Prepare this process and return its device, "cpu" or "cuda".

    A second role in the same process may call it again; the process group stays.

    Args:
        device: "auto" is CUDA if this process sees a CUDA device.
        num_threads: CPU threads for torch. None: the machine's cores divided by its workers.
        single_process: Whether to join a process group of its own. The process communicates with no other rank then,
            so it can be restarted without them.
        call_timeout_s: `trainer.call_timeout_s`, from which the timeout of collectives follows.
    """
    device = resolve_device(device)
    if device == "cpu":
        keep_freed_memory()
    torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not dist.is_initialized():
        with PROCESS.start_times.part("group"):
            join_process_group(device, single_process=single_process, call_timeout_s=call_timeout_s)
    return device


def keep_freed_memory() -> bool:
    """Let glibc keep what torch frees for its next tensor; return whether it does.

    Else it returns the memory of large tensors to the kernel, which clears each page again when the next step uses it.
    The process then holds its peak between steps. With another allocator or the user's own choice nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, -1))  # 1 GiB; -1: never


def resolve_device(device: str) -> str:
    """Return "cuda" or "cpu" for a `trainer.device` setting and the devices of this process."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("trainer.device=cuda, but this process sees no CUDA device; use trainer.device=cpu or auto")
    return "cuda" if available and device != "cpu" else "cpu"


def join_process_group(device: str, *, single_process: bool = False, call_timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Join the process group of the environment, or one of its own. A world of one needs no network.

    The group has all ranks, or the adjacent ones that communicate with each other (`Worker.num_peers`).
    """
    world_size = 1 if single_process else int(os.environ.get(PROCESS_GROUP_SIZE, os.environ["WORLD_SIZE"]))
    rank = int(os.environ["RANK"]) % world_size
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=COLLECTIVE_PER_CALL * call_timeout_s)
    store = dist.HashStore() if world_size == 1 else _join_store(rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def collective_timeout() -> datetime.timedelta:
    """Return the timeout of this process's group, for further groups: torch gives them a constant otherwise."""
    group = dist.group.WORLD
    assert group is not None  # `init_worker_process` has made it
    timeout: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def _join_store(rank: int, world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT; rank 0 listens there, and only there.

    torch's own rendezvous (env://) listens at every address of the machine.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = take_listener(port) if rank == 0 else None
    if listener is None:
        return dist.TCPStore(host, port, world_size, rank == 0, timeout)
    store = dist.TCPStore(host, port, world_size, True, timeout, master_listen_fd=listener.fileno())
    listener.detach()  # the store closes it
    return store


def sum_over_ranks(values: list[float], *, device: str) -> list[float]:
    """Return the element-wise sum of a list of numbers over all ranks, in float64. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


def sum_dicts_over_ranks(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return, for each position, the sum over ranks of the dictionaries at that position. Collective.

    A missing name counts as 0.
    """
    rows_by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(rows_by_rank, rows)
    names = sorted(set().union(*(row for ranks_rows in rows_by_rank for row in ranks_rows)))
    return [
        {name: exact_sum(ranks_rows[i].get(name, 0.0) for ranks_rows in rows_by_rank) for name in names}
        for i in range(len(rows))
    ]


def exact_sum(values: Iterable[float]) -> float:
    """Return the exact sum, independent of the order. Infinities give an infinity or nan, as floats do."""
    summands = list(values)
    return math.fsum(summands) if all(map(math.isfinite, summands)) else sum(summands)
