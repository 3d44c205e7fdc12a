"""A program as torchrun runs it: adds up all ranks, and writes what it was told into a file.

With `die` or `fail`, rank 1 does so first.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    folder, *what = sys.argv[1:]
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    if rank == 1 and what == ["die"] and restarts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and what == ["fail"]:
        raise ArithmeticError("a mistake in the program")
    if rank == 1 and what == ["exit"]:
        sys.exit(3)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    told = [
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME")
    ]
    Path(folder, f"rank-{rank}").write_text(f"{' '.join(told)}: {total.item()}, restarts {restarts}")
    dist.destroy_process_group()
    sys.exit(0)
