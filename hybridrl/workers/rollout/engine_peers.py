"""`EnginePeers`: keep the processes of one engine at the same step while they serve requests.

A tensor-parallel engine has a process for each of its ranks. Each has a `RequestEngine`, which gets the same calls.
The engines compute together only if each process adds the same requests between the same two steps. A call therefore
ends on all ranks after the same step: when the time slice of the first rank is over.

After each step the ranks compare what it has finished. Ranks that differ would compute with tensors that do not belong
together.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.workers.process_setup import collective_timeout
from hybridrl.workers.rollout.requests import TokenOutput


class EnginePeers:
    """The ranks of one engine, as one of them sees the others.

    All of them must create it at the same time. Their messages have a process group of their own, so that a rank which
    failed in the middle of a step cannot mistake them for a message of the engine.

    Args:
        ranks: Of the engine, in torch's default process group.
    """

    def __init__(self, ranks: Sequence[int]):
        self._group = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True, timeout=collective_timeout()
        )
        self._size = len(ranks)

    def is_over(self, own: bool, finished: Sequence[TokenOutput], *, num_open: Sequence[int]) -> bool:
        """Return whether the time slice of the first rank is over, after a step of all ranks.

        Args:
            own: Whether that of this rank is.
            finished: Outputs of the requests that ended in this step.
            num_open: Numbers of open requests, to compare.

        Raises:
            RuntimeError: The ranks differ in what they finished or in their open requests. On all of them.
        """
        state = repr(([(out.request_id, out.finish_reason, out.token_ids) for out in finished], list(num_open)))
        row = torch.tensor([own, zlib.crc32(state.encode())], dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self._size)]
        dist.all_gather(rows, row, group=self._group)
        first = rows[0].tolist()
        differing = [rank for rank, other in enumerate(rows) if int(other[1]) != first[1]]
        if differing:
            raise RuntimeError(
                f"ranks {differing} of a tensor-parallel engine have finished other requests or tokens than its rank 0 "
                "in the same step; their next tokens would be wrong. The first error of a rank is in its log"
            )
        return bool(first[0])
