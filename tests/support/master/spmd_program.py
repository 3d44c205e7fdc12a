"""A program for torchrun: adds up all ranks, and writes its torchrun variables into a file.

With the argument `die`, `fail` or `exit`, rank 1 does so first.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    folder, *options = sys.argv[1:]
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    if rank == 1 and options == ["die"] and restarts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and options == ["fail"]:
        raise ArithmeticError("an error in the program")
    if rank == 1 and options == ["exit"]:
        sys.exit(3)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    variables = [
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME")
    ]
    Path(folder, f"rank-{rank}").write_text(f"{' '.join(variables)}: {total.item()}, restarts {restarts}")
    dist.destroy_process_group()
    sys.exit(0)
