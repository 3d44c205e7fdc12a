"""Resource pools: how many worker processes on how many nodes, and the placement groups that reserve their devices."""

import itertools
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.errors import PlacementError
from hybridrl.single_controller.waiting import wait_ready

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# Reserving devices is immediate when they are free; a longer wait means that somebody else holds them.
PLACEMENT_TIMEOUT_S = 60.0
ROUNDING = 1e-6  # of shares that add up to a whole


class Slot(NamedTuple):
    """The place of one worker process: a bundle of a placement group."""

    group: "PlacementGroup"
    bundle: int


class ResourcePool:
    """A division of the cluster: `process_on_nodes[i]` worker slots on node i. Nodes may differ.

    max_colocate_count: how many processes may share one slot when their groups do not say how large a share they take.
    """

    def __init__(self, process_on_nodes: Sequence[int], *, max_colocate_count: int = 10):
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
        """For each rank, how many ranks its node holds."""
        return [size for size in self.store for _ in range(size)]

    @property
    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node."""
        return list(itertools.chain.from_iterable(range(size) for size in self.store))

    def add_node(self, process_count: int) -> None:
        """Add a node with so many worker slots."""
        if process_count < 1:
            raise ValueError(f"process_count={process_count} must be at least 1")
        self.store.append(process_count)


class RayResourcePool(ResourcePool):
    """A resource pool whose slots are bundles of Ray placement groups, one group per node.

    use_gpu: each slot holds one GPU, otherwise one CPU; None: one GPU where the cluster has any. detached: the groups outlive the
    driver. accelerator_type: only nodes with this accelerator, by Ray's name of it.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool | None = None,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        *,
        detached: bool = False,
        accelerator_type: str | None = None,
    ):
        super().__init__(process_on_nodes, max_colocate_count=max_colocate_count)
        self._use_gpu, self.detached, self.accelerator_type = use_gpu, detached, accelerator_type
        self.name_prefix = name_prefix or f"pool-{uuid.uuid4().hex[:6]}"  # Ray refuses a second placement group of the same name
        self._groups: list[PlacementGroup] | None = None
        self._taken: dict[str, float] = {}  # group of workers -> share of every slot

    def add_node(self, process_count: int) -> None:
        if self._groups is not None:
            raise ValueError(f"pool {self.name_prefix!r} has reserved its nodes; add nodes before the first group starts on it")
        super().add_node(process_count)

    @property
    def use_gpu(self) -> bool:
        """Whether a slot holds a GPU; asks the connected cluster if nobody said."""
        if self._use_gpu is None:
            self._use_gpu = cluster_has_gpus()
        return self._use_gpu

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one slot."""
        bundle: dict[str, float] = {"CPU": 1}
        if self.use_gpu:
            bundle["GPU"] = 1
            if self.accelerator_type:
                bundle[f"accelerator_type:{self.accelerator_type}"] = 1e-4
        return bundle

    def get_placement_groups(self, strategy: str = "STRICT_PACK") -> "list[PlacementGroup]":
        """Return one placement group per node, in the order of ranks, reserved on the first call.

        Groups of equal size are ordered by their nodes' addresses, so that the same cluster gives the same ranks.
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
            self._wait(self._groups)
            self.adopt(self._groups)
        return self._groups

    def _wait(self, groups: "list[PlacementGroup]") -> None:
        try:
            for node, group in enumerate(groups):
                wait_ready(group.ready(), what=f"pool {self.name_prefix!r} on node {node}", timeout_s=PLACEMENT_TIMEOUT_S)
        except BaseException:
            self.release()
            raise

    def adopt(self, groups: "list[PlacementGroup]") -> None:
        """Take these reserved groups as the pool's nodes, one for each entry of `store` and of that size."""
        self._groups = _by_address(groups)

    def slots(self) -> list[Slot]:
        """Return the place of every rank, reserved on the first call."""
        return [Slot(group, bundle) for group in self.get_placement_groups() for bundle in range(group.bundle_count)]

    def take(self, user: str, share: float) -> None:
        """Note that a group of workers takes a share of every slot. Raises PlacementError when there is not so much left."""
        left = 1 - sum(self._taken.values())
        if share > left + ROUNDING:
            taken = ", ".join(f"{name}: {amount:g}" for name, amount in self._taken.items())
            raise PlacementError(
                f"{user!r} wants {share:g} of each slot of pool {self.name_prefix!r}, which has {left:g} left ({taken}); "
                "give it a smaller share, end another group, or use another pool"
            )
        self._taken[user] = self._taken.get(user, 0.0) + share

    def give_back(self, user: str) -> None:
        """Note that a group of workers has ended."""
        self._taken.pop(user, None)

    def release(self) -> None:
        """Give the reserved devices back. Processes that still run there are ended by Ray."""
        from ray.util.placement_group import remove_placement_group

        for group in self._groups or []:
            remove_placement_group(group)
        self._groups = None
        self._taken.clear()

    def __enter__(self) -> "RayResourcePool":
        return self

    def __exit__(self, *_) -> None:
        self.release()


def _by_address(groups: "list[PlacementGroup]") -> "list[PlacementGroup]":
    """Order groups of equal size by address; which sizes follow each other stays as the pool's owner wrote it."""
    import ray
    from ray.util.placement_group import placement_group_table

    address_of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group) -> tuple:
        node = placement_group_table(group)["bundles_to_node_id"][0]
        return tuple(part.zfill(3) for part in address_of_node.get(node, "").split(".")), node

    of_size = {size: iter(sorted((g for g in groups if g.bundle_count == size), key=address)) for size in {g.bundle_count for g in groups}}
    return [next(of_size[group.bundle_count]) for group in groups]


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
        "Lower trainer.n_gpus_per_node or trainer.nnodes, or add nodes to the Ray cluster and name it with RAY_ADDRESS"
    )


def cluster_has_gpus() -> bool:
    """Return whether the connected Ray cluster has GPUs."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0
