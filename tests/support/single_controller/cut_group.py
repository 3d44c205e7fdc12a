"""One of two ranks of a gloo group whose connection ends between two collective calls.

    python -m tests.support.single_controller.cut_group RANK PORT

Rank 0 cuts the connection. Both print what `broken_connection` finds in the error of the second call.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.single_controller.awaiting import broken_connection
from tests.support.chaos.victim import cut_connections

TIMEOUT = timedelta(seconds=100)


def main(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    if rank == 0:
        cut_connections()
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        print(broken_connection(error))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
