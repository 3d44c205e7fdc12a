"""One rank of an engine over two processes, without an engine: `python engine_peers_rank.py RANK STORE_FILE`.

Prints what `EnginePeers.is_over` returns or raises in each of its steps, as a JSON list.
"""

import json
import sys

import torch.distributed as dist

from hybridrl.workers.rollout.engine_peers import EnginePeers
from hybridrl.workers.rollout.requests import TokenOutput


def output(*tokens: int) -> TokenOutput:
    return TokenOutput("r", list(tokens), [-0.5] * len(tokens), "stop", 1)


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    peers = EnginePeers(range(2))
    steps = [
        (rank == 1, [], (3, 3)),  # only the time slice of rank 1 is over
        (rank == 0, [output(5, 6)], (2, 2)),
        (False, [output(5, 6 + rank)], (1, 1)),  # another token on rank 1
        (False, [], (1 - rank, 1)),  # rank 1 has taken its request out of the engine
        (False, [], (0, 0)),
    ]
    results: list[bool | str] = []
    for own, finished, num_open in steps:
        try:
            results.append(peers.is_over(own, finished, num_open=num_open))
        except RuntimeError as error:
            results.append(str(error))
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
