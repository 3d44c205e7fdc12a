"""`RayResourcePool`: worker slots on nodes, and the placement groups that reserve them.

Used in the driver.
"""

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement import placement_groups
from hybridrl.single_controller.placement.feasibility import check_feasible
from hybridrl.single_controller.placement.node_loss import REPLACE_TIMEOUT_S, replace_lost_nodes
from hybridrl.single_controller.placement.node_slots import CAPACITY_HINT, ResourcePool
from hybridrl.single_controller.placement.plan import PoolPlan, Reservation

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

ROUNDING = 1e-6  # tolerance when shares are summed


class Slot(NamedTuple):
    """A bundle of a placement group, for one worker process or several with a share each."""

    group: "PlacementGroup"
    bundle: int


class RayResourcePool(ResourcePool):
    """A resource pool whose slots are bundles of Ray placement groups, one group per node.

    Args:
        use_gpu: each slot has one GPU, otherwise one CPU. None: one GPU if the cluster has any.
        name_prefix: unique on the cluster, because Ray refuses a second placement group of the same name.
        detached: the groups outlive the driver.
        accelerator_type: use only nodes with this accelerator, by Ray's name.

    Attributes:
        replace_timeout_s: seconds to find a node in place of a lost one.
    """

    replace_timeout_s = REPLACE_TIMEOUT_S

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool | None = None,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        *,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count=max_colocate_count)
        self._use_gpu, self.detached, self.accelerator_type = use_gpu, detached, accelerator_type
        self.name_prefix = name_prefix or f"pool-{uuid.uuid4().hex[:6]}"
        self._plan: PoolPlan | None = None
        self._groups: list[PlacementGroup] | None = None
        self._shares: dict[str, float] = {}  # worker group -> its share of every slot

    def add_node(self, process_count: int) -> None:
        if self._groups is not None:
            raise ValueError(
                f"pool {self.name_prefix!r} has reserved its nodes; add nodes before the first group starts on it"
            )
        if self._plan is not None:
            raise ValueError(f"pool {self.name_prefix!r} is part of a plan; add nodes to the plan's specification")
        super().add_node(process_count)

    @property
    def use_gpu(self) -> bool:
        """Whether a slot has a GPU; if not given, whether the connected cluster has any."""
        if self._use_gpu is None:
            self._use_gpu = cluster_has_gpus()
        return self._use_gpu

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one slot, by Ray's names."""
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
        """Return the pool of a plan, with the plan's bundles."""
        use_gpu = any("GPU" in bundle for one in plan.reservations for bundle in one.bundles)
        prefix = plan.reservations[0].name.rpartition("/")[0]
        pool = cls(
            [len(one.bundles) for one in plan.reservations], use_gpu, prefix, max_colocate_count, detached=detached
        )
        pool._plan = plan
        return pool

    def reservations(self) -> Sequence[Reservation]:
        """Return one reservation per node."""
        if self._plan is not None:
            return self._plan.reservations
        names = [f"{self.name_prefix}/node-{node}" for node in range(len(self.store))]
        sizes = zip(names, self.store, strict=True)
        return [Reservation(name, self.name_prefix, (self.bundle,) * size, hint=CAPACITY_HINT) for name, size in sizes]

    def get_placement_groups(self, strategy: str = "STRICT_PACK") -> "list[PlacementGroup]":
        """Return one placement group per node, in the order of ranks; reserve them on the first call.

        Groups with equal bundles are ordered by their nodes' addresses, so that the same cluster gives the same ranks.

        Raises:
            PlacementError: the cluster's nodes cannot hold the pool; says what is missing. Nothing stays reserved.
        """
        if self._groups is None:
            reservations = self.reservations()
            check_feasible(reservations, placement_groups.cluster_nodes())
            self.use_groups(placement_groups.reserve(reservations, strategy=strategy, detached=self.detached))
        return self._groups or []

    def use_groups(self, groups: "list[PlacementGroup]") -> None:
        """Use reserved groups as the pool's nodes, one for each entry of `store` and of that size."""
        self._groups = _by_address(groups)

    def reattach(self) -> None:
        """Use the placement groups that a previous driver of the same run reserved.

        Raises:
            PlacementError: a group is missing.
        """
        names = [one.name for one in self.reservations()]
        found = placement_groups.find_leftover_groups(names[0].rsplit("/", 2)[0])
        if missing := [name for name in names if name not in found]:
            raise PlacementError(f"the placement groups {missing} no longer exist; start the job again")
        self.use_groups([found[name] for name in names])

    def slots(self) -> list[Slot]:
        """Return the slot of every rank; reserve them on the first call."""
        return [Slot(group, bundle) for group in self.get_placement_groups() for bundle in range(group.bundle_count)]

    def replace_lost_nodes(self) -> None:
        """Reserve slots of lost nodes again on other nodes.

        Raises:
            PlacementError: no other node had free capacity in time.
        """
        self._groups = replace_lost_nodes(
            self.get_placement_groups(), self.reservations(), detached=self.detached, timeout_s=self.replace_timeout_s
        )

    def acquire_share(self, user: str, share: float) -> None:
        """Record that a worker group takes a share of every slot.

        Raises:
            PlacementError: less is left.
        """
        left = 1 - sum(self._shares.values())
        if share > left + ROUNDING:
            shares = ", ".join(f"{name}: {amount:g}" for name, amount in self._shares.items())
            raise PlacementError(
                f"{user!r} needs {share:g} of each slot of pool {self.name_prefix!r}, which has {left:g} left "
                f"({shares}); give it a smaller share, end another group, or use another pool"
            )
        self._shares[user] = self._shares.get(user, 0.0) + share

    def release_share(self, user: str) -> None:
        """Return the share of a worker group that has ended."""
        self._shares.pop(user, None)

    def release(self) -> None:
        """Release the reserved devices; Ray kills processes that still run on them."""
        placement_groups.remove(self._groups or [])
        self._groups = None
        self._shares.clear()

    def __enter__(self) -> "RayResourcePool":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _by_address(groups: "list[PlacementGroup]") -> "list[PlacementGroup]":
    """Order groups with equal bundles by node address; keep the order of different bundles."""
    import ray

    address_of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group: "PlacementGroup") -> tuple[tuple[str, ...], str]:
        [node] = placement_groups.nodes_of([group])
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

    return bool(ray.cluster_resources().get("GPU", 0) > 0)
