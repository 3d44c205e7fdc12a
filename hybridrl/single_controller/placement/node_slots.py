"""`ResourcePool`: how many worker slots each node has. Used in the driver; reserves nothing."""

import itertools
from collections.abc import Sequence

CAPACITY_HINT = (
    "Lower trainer.n_gpus_per_node or trainer.nnodes, or add nodes to the Ray cluster and name it with RAY_ADDRESS"
)


class ResourcePool:
    """Worker slots on nodes: `process_on_nodes[i]` slots on node i.

    Args:
        max_colocate_count: processes that may share one slot; a group takes `1 / max_colocate_count` by default.

    Attributes:
        sees_node_devices: a process sees the devices of all processes of its group on its node, by local rank.
    """

    sees_node_devices = False

    def __init__(self, process_on_nodes: Sequence[int], *, max_colocate_count: int = 10) -> None:
        if not process_on_nodes or any(n < 1 for n in process_on_nodes):
            raise ValueError(f"process_on_nodes={list(process_on_nodes)} must name at least one process on every node")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count={max_colocate_count} must be at least 1")
        self.store = list(process_on_nodes)
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return sum(self.store)

    @property
    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of ranks on its node."""
        return [size for size in self.store for _ in range(size)]

    @property
    def local_rank_list(self) -> list[int]:
        """For each rank, its index on its node."""
        return list(itertools.chain.from_iterable(range(size) for size in self.store))

    def rank_environment(self, rank: int) -> dict[str, str]:
        """Return environment variables of a rank beyond those of `RankInfo`."""
        return {
            "NODE_RANK": str(next(node for node, last in enumerate(itertools.accumulate(self.store)) if rank < last))
        }

    def add_node(self, process_count: int) -> None:
        """Add a node with this many worker slots."""
        if process_count < 1:
            raise ValueError(f"process_count={process_count} must be at least 1")
        self.store.append(process_count)

    def release(self) -> None:
        """Release reserved devices; nothing is reserved here."""
