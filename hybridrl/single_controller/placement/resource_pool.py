"""Resource pools: how many worker processes on how many nodes, and the placement groups that reserve their devices."""

import itertools
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.feasibility import check_feasible
from hybridrl.single_controller.placement.node_loss import move_from_lost_nodes
from hybridrl.single_controller.placement.placement_groups import (
    find_left,
    machines_of_cluster,
    nodes_of,
    remove,
    reserve,
)
from hybridrl.single_controller.placement.plan import PoolPlan, Reservation

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

ROUNDING = 1e-6  # of shares that add up to a whole
WAY_OUT = (
    "Lower trainer.n_gpus_per_node or trainer.nnodes, or add nodes to the Ray cluster and name it with RAY_ADDRESS"
)


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

    def place_environment(self, rank: int) -> dict[str, str]:
        """Return what else the process of this rank is told about its place."""
        return {
            "NODE_RANK": str(next(node for node, last in enumerate(itertools.accumulate(self.store)) if rank < last))
        }

    def add_node(self, process_count: int) -> None:
        """Add a node with so many worker slots."""
        if process_count < 1:
            raise ValueError(f"process_count={process_count} must be at least 1")
        self.store.append(process_count)


class RayResourcePool(ResourcePool):
    """A resource pool whose slots are bundles of Ray placement groups, one group per node.

    use_gpu: each slot holds one GPU, otherwise one CPU; None: one GPU where the cluster has any. detached: the groups
    outlive the driver. accelerator_type: only nodes with this accelerator, by Ray's name of it.
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
        self.name_prefix = (
            name_prefix or f"pool-{uuid.uuid4().hex[:6]}"
        )  # Ray refuses a second placement group of the same name
        self._plan: PoolPlan | None = None
        self._groups: list[PlacementGroup] | None = None
        self._taken: dict[str, float] = {}  # group of workers -> share of every slot

    def add_node(self, process_count: int) -> None:
        if self._groups is not None:
            raise ValueError(
                f"pool {self.name_prefix!r} has reserved its nodes; add nodes before the first group starts on it"
            )
        if self._plan is not None:
            raise ValueError(f"pool {self.name_prefix!r} is part of a plan; add nodes to what the plan is made from")
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
        if self._plan is not None:
            return dict(self._plan.reservations[0].bundles[0])
        bundle: dict[str, float] = {"CPU": 1}
        if self.use_gpu:
            bundle["GPU"] = 1
            if self.accelerator_type:
                bundle[f"accelerator_type:{self.accelerator_type}"] = 1e-4
        return bundle

    @classmethod
    def planned(cls, plan: PoolPlan, *, max_colocate_count: int = 10, detached: bool = False) -> "RayResourcePool":
        """Return the pool that a plan has; its bundles are the plan's."""
        use_gpu = any("GPU" in bundle for one in plan.reservations for bundle in one.bundles)
        prefix = plan.reservations[0].name.rpartition("/")[0]
        pool = cls(
            [len(one.bundles) for one in plan.reservations], use_gpu, prefix, max_colocate_count, detached=detached
        )
        pool._plan = plan
        return pool

    def reservations(self) -> Sequence[Reservation]:
        """Return what the pool reserves, one placement group per node."""
        if self._plan is not None:
            return self._plan.reservations
        names = [f"{self.name_prefix}/node-{node}" for node in range(len(self.store))]
        sizes = zip(names, self.store, strict=True)
        return [Reservation(name, self.name_prefix, (self.bundle,) * size, way_out=WAY_OUT) for name, size in sizes]

    def get_placement_groups(self, strategy: str = "STRICT_PACK") -> "list[PlacementGroup]":
        """Return one placement group per node, in the order of ranks, reserved on the first call.

        Groups of the same bundles are ordered by their nodes' addresses, so that the same cluster gives the same ranks.
        Raises PlacementError when the cluster's nodes cannot hold the pool, saying what is missing; nothing stays
        reserved then.
        """
        if self._groups is None:
            wanted = self.reservations()
            check_feasible(wanted, machines_of_cluster())
            self.adopt(reserve(wanted, strategy=strategy, detached=self.detached))
        return self._groups or []

    def adopt(self, groups: "list[PlacementGroup]") -> None:
        """Take these reserved groups as the pool's nodes, one for each entry of `store` and of that size."""
        self._groups = _by_address(groups)

    def take_up(self) -> None:
        """Take as the pool's nodes what an earlier driver of the same run reserved.

        Raises PlacementError if that is not there.
        """
        names = [one.name for one in self.reservations()]
        found = find_left(names[0].rsplit("/", 2)[0])
        if missing := [name for name in names if name not in found]:
            raise PlacementError(f"{missing} are not reserved any more; the job has to be started anew")
        self.adopt([found[name] for name in names])

    def slots(self) -> list[Slot]:
        """Return the place of every rank, reserved on the first call."""
        return [Slot(group, bundle) for group in self.get_placement_groups() for bundle in range(group.bundle_count)]

    def move_from_lost_nodes(self) -> None:
        """Have every slot on a living node again, where one was lost.

        Raises PlacementError when no other has room in time.
        """
        self._groups = move_from_lost_nodes(self.get_placement_groups(), self.reservations(), detached=self.detached)

    def take(self, user: str, share: float) -> None:
        """Note that a group of workers takes a share of every slot.

        Raises PlacementError when there is not so much left.
        """
        left = 1 - sum(self._taken.values())
        if share > left + ROUNDING:
            taken = ", ".join(f"{name}: {amount:g}" for name, amount in self._taken.items())
            raise PlacementError(
                f"{user!r} wants {share:g} of each slot of pool {self.name_prefix!r}, which has {left:g} "
                f"left ({taken}); "
                "give it a smaller share, end another group, or use another pool"
            )
        self._taken[user] = self._taken.get(user, 0.0) + share

    def give_back(self, user: str) -> None:
        """Note that a group of workers has ended."""
        self._taken.pop(user, None)

    def release(self) -> None:
        """Give the reserved devices back. Processes that still run there are ended by Ray."""
        remove(self._groups or [])
        self._groups = None
        self._taken.clear()

    def __enter__(self) -> "RayResourcePool":
        return self

    def __exit__(self, *_) -> None:
        self.release()


def _by_address(groups: "list[PlacementGroup]") -> "list[PlacementGroup]":
    """Order groups of the same bundles by address; which sizes follow each other stays as the pool's owner wrote it."""
    import ray

    address_of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group: "PlacementGroup") -> tuple:
        [node] = nodes_of([group])
        return tuple(part.zfill(3) for part in address_of_node.get(node, "").split(".")), node

    kinds = [str([sorted(bundle.items()) for bundle in group.bundle_specs]) for group in groups]
    in_order = {
        kind: iter(sorted((g for g, k in zip(groups, kinds, strict=True) if k == kind), key=address))
        for kind in set(kinds)
    }
    return [next(in_order[kind]) for kind in kinds]


def cluster_has_gpus() -> bool:
    """Return whether the connected Ray cluster has GPUs."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0
