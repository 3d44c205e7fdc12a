"""Ray's object store for the arrays of object columns, see `StoredArray`.

The process that makes an array puts it there once. From then on a message has its reference, which the driver passes on
unread. Ray deletes an object with its owner, the process that put it there. Arrays of a rollout that dies before the
trainer has read them are generated again with their step. What is kept for later steps the driver stores once more, see
`DataProto.stored_again`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.data_plane.futures import Fetch, StoredArray, use_array_store
from hybridrl.errors import ObjectLost, WorkerLost
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S
from hybridrl.single_controller.monitoring.process import PROCESS

DRIVER = ("driver", 0)


@dataclass(frozen=True)
class ArrayFetcher:
    """Fetches the arrays that a process has stored. Ray deletes them when the process dies.

    Attributes:
        role, rank: Of that process.
    """

    role: str
    rank: int

    def __call__(self, references: list[Any]) -> list[Any]:
        """Return the arrays.

        Raises:
            WorkerLost: They were lost. It names the worker that needs them, because its peers may already wait for it
                in a collective call, and have to be replaced with it; in the driver the worker that had them.
        """
        try:
            ranks = [self.rank] * len(references)
            return wait_all(references, ranks, role=self.role, method="store", timeout_s=DEFAULT_TIMEOUT_S)
        except (ObjectLost, WorkerLost) as error:
            role, rank = PROCESS.worker or (self.role, self.rank)
            cause = f"arrays that it needs were lost with {self.role}-{self.rank}, which had stored them"
            raise WorkerLost(role, rank, "store", cause) from error


def share_arrays(role: str, rank: int) -> None:
    """Let this process store arrays in Ray's object store from now on.

    Args:
        role, rank: Of this process, `DRIVER` or a worker's.
    """
    import ray

    fetch = ArrayFetcher(role, rank)

    def put(arrays: list[np.ndarray]) -> tuple[Any, Fetch] | None:
        return (ray.put(arrays), fetch) if ray.is_initialized() else None  # a later run of this process may have no Ray

    use_array_store(put)
    ray.util.register_serializer(
        StoredArray, serializer=lambda array: (array.block, array.index), deserializer=lambda parts: StoredArray(*parts)
    )
