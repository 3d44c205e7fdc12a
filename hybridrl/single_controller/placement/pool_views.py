"""Pools made of other pools' slots: split, merged, or found again by another driver.

The pools are views: their bundles belong to the pool that reserved them, and only that pool releases them.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.placement_groups import groups_of_nodes
from hybridrl.single_controller.placement.plan import ProcessPlan
from hybridrl.single_controller.placement.resource_pool import RayResourcePool, Slot

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class SubRayResourcePool(RayResourcePool):
    """Some slots of other pools, which must outlive it.

    Args:
        ranks: pool and rank in it, of each slot.
        like: pool whose other settings are copied.
    """

    def __init__(
        self, ranks: Sequence[tuple[RayResourcePool, int]], *, like: RayResourcePool, name_prefix: str
    ) -> None:
        self._ranks, self._pools = list(ranks), list({id(pool): pool for pool, _ in ranks}.values())
        slots_on_nodes = [len(list(run)) for _, run in itertools.groupby(self.slots(), key=lambda slot: slot.group.id)]
        super().__init__(
            slots_on_nodes,
            like.use_gpu,
            name_prefix,
            like.max_colocate_count,
            detached=like.detached,
            accelerator_type=like.accelerator_type,
        )

    def slots(self) -> list[Slot]:
        slots = {id(pool): pool.slots() for pool in self._pools}
        return [slots[id(pool)][rank] for pool, rank in self._ranks]

    def get_placement_groups(self, strategy: str = "STRICT_PACK") -> "list[PlacementGroup]":
        return list({slot.group.id: slot.group for slot in self.slots()}.values())

    def replace_lost_nodes(self) -> None:
        for pool in self._pools:
            pool.replace_lost_nodes()

    def release(self) -> None:
        """Do nothing: the bundles belong to the pools that this one was made of."""


class PlannedPoolView(SubRayResourcePool):
    """The slots of a pool for the ranks of one `ProcessPlan`; several ranks may share a slot.

    If the processes use every slot of the pool, their share is acquired from the pool. A group that is created by hand
    then gets the rest.
    """

    def __init__(self, pool: RayResourcePool, process: ProcessPlan, *, job: str) -> None:
        ranks = [sum(pool.store[:node]) + bundle for node, bundle in process.slots]
        super().__init__([(pool, rank) for rank in ranks], like=pool, name_prefix=pool.name_prefix)
        self._pool, self._process, self._job = pool, process, job
        self.sees_node_devices = process.sees_node_devices
        per_slot = [process.slots.count(slot) for slot in dict.fromkeys(process.slots)]
        self._processes_per_slot = min(per_slot) if len(per_slot) == pool.world_size else 0

    def rank_environment(self, rank: int) -> dict[str, str]:
        return self._process.rank_environment(rank, f"{self._job}/{self._process.label}-{rank}")

    def acquire_share(self, user: str, share: float) -> None:
        self._pool.acquire_share(user, share * self._processes_per_slot)

    def release_share(self, user: str) -> None:
        self._pool.release_share(user)


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Return pools of consecutive ranks: of `split_size` each, or of these sizes.

    Raises:
        ValueError: the sizes do not add up to the pool's.
    """
    world_size = resource_pool.world_size
    sizes = [split_size] * (world_size // split_size) if isinstance(split_size, int) and split_size > 0 else split_size
    if not isinstance(sizes, list | tuple) or sum(sizes) != world_size or min(sizes) < 1:
        raise ValueError(
            f"split_size={split_size} does not divide a pool of {world_size} processes; give sizes that "
            f"add up to {world_size}"
        )
    ranks = iter([(resource_pool, rank) for rank in range(world_size)])
    return [
        SubRayResourcePool(
            list(itertools.islice(ranks, size)), like=resource_pool, name_prefix=f"{resource_pool.name_prefix}/part-{i}"
        )
        for i, size in enumerate(sizes)
    ]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> SubRayResourcePool:
    """Return a pool of the ranks of the first pool and then those of the second.

    Raises:
        ValueError: the pools differ in use_gpu, max_colocate_count or detached.
    """
    for setting in ("use_gpu", "max_colocate_count", "detached"):
        if getattr(first, setting) != getattr(second, setting):
            raise ValueError(
                f"pools with {setting}={getattr(first, setting)} and {getattr(second, setting)} cannot be merged"
            )
    ranks = [(pool, rank) for pool in (first, second) for rank in range(pool.world_size)]
    return SubRayResourcePool(ranks, like=first, name_prefix=f"{first.name_prefix}+{second.name_prefix}")


def extract_pg_from_exist(
    resource_pools: dict[str, RayResourcePool], src_role_names: Sequence[str], resource_pool: RayResourcePool
) -> "list[PlacementGroup]":
    """Return, for each node of `resource_pool`, another placement group of the named pools that can hold it.

    Raises:
        PlacementError: the named pools cannot hold it.
    """
    groups = [group for name in src_role_names for group in resource_pools[name].get_placement_groups()]
    have = [group.bundle_count for group in groups]
    found: dict[int, PlacementGroup] = {}
    for node in sorted(range(len(resource_pool.store)), key=lambda i: -resource_pool.store[i]):
        fitting = [group for group in groups if group.bundle_count >= resource_pool.store[node]]
        if not fitting:
            raise PlacementError(
                f"the pools {list(src_role_names)} have {have} slots per node, which cannot hold {resource_pool.store}"
            )
        found[node] = min(fitting, key=lambda group: group.bundle_count)
        groups.remove(found[node])
    return [found[node] for node in range(len(resource_pool.store))]


def attach_resource_pool(name_prefix: str) -> RayResourcePool:
    """Return the detached pool that another driver reserved under this name; `release` frees its devices.

    Raises:
        PlacementError: no pool has this name.
    """
    if not (groups := groups_of_nodes(name_prefix)):
        raise PlacementError(f"no reserved pool on this cluster is named {name_prefix!r}")
    sizes, use_gpu = [group.bundle_count for group in groups], "GPU" in groups[0].bundle_specs[0]
    pool = RayResourcePool(sizes, use_gpu, name_prefix, detached=True)
    pool.use_groups(groups)
    return pool
