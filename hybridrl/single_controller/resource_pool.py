"""Resource pools: how many worker processes on how many nodes, and the placement groups that reserve their devices."""

import itertools
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridrl.errors import PlacementError
from hybridrl.single_controller.waiting import wait_ready

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# Reserving devices is immediate when they are free; a longer wait means that somebody else holds them.
PLACEMENT_TIMEOUT_S = 60.0


class ResourcePool:
    """A division of the cluster: `process_on_nodes[i]` worker slots on node i. Nodes may differ."""

    def __init__(self, process_on_nodes: Sequence[int], *, max_colocate_count: int = 10):
        if not process_on_nodes or any(n < 1 for n in process_on_nodes):
            raise ValueError(f"process_on_nodes={list(process_on_nodes)} must name at least one process on every node")
        self.store = list(process_on_nodes)
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return sum(self.store)

    @property
    def local_world_size_list(self) -> list[int]:
        """For each rank, how many ranks its node holds."""
        return [size for size in self.store for _ in range(size)]

    @property
    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node."""
        return list(itertools.chain.from_iterable(range(size) for size in self.store))


class RayResourcePool(ResourcePool):
    """A resource pool whose slots are bundles of Ray placement groups, one group per node.

    use_gpu: each slot holds one GPU; otherwise one CPU. detached: the groups outlive the driver.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str | None = None,
        *,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ):
        super().__init__(process_on_nodes, max_colocate_count=max_colocate_count)
        self.use_gpu, self.detached, self.accelerator_type = use_gpu, detached, accelerator_type
        self.name_prefix = name_prefix or f"pool-{uuid.uuid4().hex[:6]}"  # Ray refuses a second placement group of the same name
        self._groups: list[PlacementGroup] | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one slot."""
        bundle: dict[str, float] = {"CPU": 1}
        if self.use_gpu:
            bundle["GPU"] = 1
            if self.accelerator_type:
                bundle[self.accelerator_type] = 1e-4
        return bundle

    def get_placement_groups(self, strategy: str = "STRICT_PACK") -> "list[PlacementGroup]":
        """Return one placement group per node, reserved on the first call.

        Raises PlacementError when the cluster's nodes cannot hold the pool, saying what is missing; nothing stays reserved then.
        """
        import ray
        from ray.util.placement_group import placement_group

        if self._groups is None:
            check_feasible(self.store, self.bundle, [node["Resources"] for node in ray.nodes() if node["Alive"]])
            lifetime = "detached" if self.detached else None
            self._groups = [
                placement_group([self.bundle] * size, strategy=strategy, name=f"{self.name_prefix}/node-{node}", lifetime=lifetime)
                for node, size in enumerate(self.store)
            ]
            self._wait()
        return self._groups

    def _wait(self) -> None:
        try:
            for node, group in enumerate(self._groups):
                wait_ready(group.ready(), what=f"pool {self.name_prefix!r} on node {node}", timeout_s=PLACEMENT_TIMEOUT_S)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the reserved devices back."""
        from ray.util.placement_group import remove_placement_group

        for group in self._groups or []:
            remove_placement_group(group)
        self._groups = None


def check_feasible(processes_per_node: Sequence[int], bundle: dict[str, float], nodes: Sequence[dict[str, float]]) -> None:
    """Raise PlacementError unless each entry of `processes_per_node` fits on a node of its own kind of resources.

    nodes: total resources of each living node. Largest demands are placed first, several may share one node.
    """
    free = [dict(node) for node in nodes]
    for size in sorted(processes_per_node, reverse=True):
        need = {name: amount * size for name, amount in bundle.items()}
        home = next((node for node in free if all(node.get(name, 0) >= amount for name, amount in need.items())), None)
        if home is None:
            raise PlacementError(_shortage(size, need, nodes))
        for name, amount in need.items():
            home[name] -= amount


def _shortage(size: int, need: dict[str, float], nodes: Sequence[dict[str, float]]) -> str:
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in need.items())
    present = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in need) for node in nodes) or "none"
    return (
        f"no node can hold {size} worker processes ({wanted} together) beside the rest of the job; nodes have: {present}. "
        "Lower trainer.n_gpus_per_node or trainer.nnodes, or add nodes to the Ray cluster"
    )


def cluster_has_gpus() -> bool:
    """Return whether the connected Ray cluster has GPUs."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0
