"""What every worker process does before it computes: find its device, cap its threads, join its process group."""

import datetime
import math
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hybridrl.errors import ConfigError

# A collective that waits longer than this has lost a peer; the controller notices a dead peer much earlier.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


def enter_process(*, device: str, num_threads: int | None, alone: bool = False) -> str:
    """Prepare this process and return its device, "cpu" or "cuda".

    device: "auto" takes CUDA where this process sees one. num_threads: CPU threads for torch; None shares the machine's
    cores among its workers. alone: it talks to no other rank of its group, so that it may end and start again without
    them. Calling it again (a second role in the same process) changes nothing.
    """
    device = resolve_device(device)
    torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not dist.is_initialized():
        join_process_group(device, alone=alone)
    return device


def resolve_device(device: str) -> str:
    """Return "cuda" or "cpu" for a `trainer.device` setting, as this process can have it."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("trainer.device=cuda, but this process sees no CUDA device; use trainer.device=cpu or auto")
    return "cuda" if available and device != "cpu" else "cpu"


def join_process_group(device: str, *, alone: bool = False) -> None:
    """Join the process group that the environment describes, or be one of its own; a world of one needs no network."""
    rank, world_size = (0, 1) if alone else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.HashStore() if world_size == 1 else None
    init_method = "env://" if store is None else None
    dist.init_process_group(
        backend, init_method=init_method, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )


def sum_over_ranks(values: list[float], *, device: str) -> list[float]:
    """Return the element-wise sum of a list of numbers over all ranks, in float64. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


def sum_dicts_over_ranks(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return, for each position, the sum over ranks of the dictionaries at that position; a name may be missing.

    Collective.
    """
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    names = sorted(set().union(*(row for ranks_rows in everyone for row in ranks_rows)))
    return [
        {name: exact_sum(ranks_rows[i].get(name, 0.0) for ranks_rows in everyone) for name in names}
        for i in range(len(rows))
    ]


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum in any order of the values; infinities are summed as floats are, to an infinity or to nan."""
    found = list(values)
    return math.fsum(found) if all(map(math.isfinite, found)) else sum(found)
