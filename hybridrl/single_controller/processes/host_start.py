"""Start of the Ray actor of a worker process: its options, its environment, its name and its node.

`WorkerProcesses` starts and replaces whole sets of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import PlacementError
from hybridrl.single_controller.cluster import NAMESPACE, find_actor, master_name
from hybridrl.single_controller.invocation import CONCURRENT, invocations_of
from hybridrl.single_controller.monitoring.heartbeat_client import MASTER_VARIABLE
from hybridrl.single_controller.placement.resource_pool import RayResourcePool, Slot
from hybridrl.single_controller.processes.worker_host import WorkerHost
from hybridrl.single_controller.worker_group import ClassWithInitArgs


@dataclass
class ProcessRecipe:
    """How the processes of a group are started, and how often each was.

    Attributes:
        run: prefix of their names.
        label: their roles, joined by "+".
        workers: role -> recipe of its worker.
        share: fraction of its slot that a process takes.
        options: of the Ray actors.
        environment: set in the processes before any import.
        incarnations: rank -> number of its process; 1 where absent.
    """

    run: str
    label: str
    workers: dict[str, ClassWithInitArgs[Any]]
    share: float
    options: dict[str, Any]
    environment: dict[str, str]
    incarnations: dict[int, int] = field(default_factory=dict)

    @property
    def group_name(self) -> str:
        return f"{self.run}/{self.label}"

    def name(self, rank: int) -> str:
        """Return the name of a rank's process; a replacement has the number of its incarnation after a dot."""
        incarnation = self.incarnations.get(rank, 1)
        return f"{self.group_name}-{rank}" + (f".{incarnation}" if incarnation > 1 else "")


def worker_environment(run: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a run's processes, except those of the rank."""
    # With MASTER_VARIABLE, a process sends heartbeats; a job without a master has none.
    master = {MASTER_VARIABLE: master_name(run)} if find_actor(master_name(run)) is not None else {}
    return {"WG_PREFIX": run, "WG_BACKEND": "ray", **master, **environment}


def find_host(name: str) -> Any:
    """Return the running worker process of this name.

    Raises:
        PlacementError: there is none.
    """
    if (host := find_actor(name)) is None:
        raise PlacementError(f"no worker process named {name!r} is running on this cluster")
    return host


def actor_options(
    pool: RayResourcePool,
    recipes: Mapping[str, ClassWithInitArgs[Any]],
    *,
    share: float,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return the options of a group's Ray actors; arguments as for `ProcessRecipe`."""
    chosen: dict[str, Any] = {"num_cpus": share, "num_gpus": share if pool.use_gpu else 0, "max_restarts": 0}
    threads = max(
        (call.concurrency for recipe in recipes.values() for call in invocations_of(recipe.cls).values()), default=1
    )
    groups = {**({CONCURRENT: threads} if threads > 1 else {}), **options.get("concurrency_groups", {})}
    if threads > groups.get(CONCURRENT, threads):
        groups[CONCURRENT] = threads
    chosen |= options
    if groups:
        # Ray then runs the calls of no group outside of the process's main thread.
        chosen["concurrency_groups"] = groups
    runtime_env = {**chosen.get("runtime_env", {})}
    if environment:
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **environment}
    return chosen | ({"runtime_env": runtime_env} if runtime_env else {})


def start_host(name: str, slot: Slot, options: Mapping[str, Any]) -> Any:
    """Return the handle of a new worker process on a slot.

    Raises:
        PlacementError: one of this name is running.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=slot.group, placement_group_bundle_index=slot.bundle)
    actor = ray.remote(**options)(WorkerHost).options(name=name, namespace=NAMESPACE, scheduling_strategy=where)
    try:
        return actor.remote(sorted(options.get("concurrency_groups", ())))
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise PlacementError(
            f"a worker process named {name!r} is running on this cluster already; attach to it with "
            "RayWorkerGroup.from_detached, end it, or choose another name_prefix"
        ) from None


def node_devices(
    reserved: Sequence[Mapping[str, Sequence[str]]], nodes: Sequence[Any], *, label: str
) -> list[dict[str, list[str]] | None]:
    """Return, for each rank, the devices of all ranks on its node, in the order of the ranks.

    Args:
        reserved: of each rank, resource name -> device ids.
        nodes: of each rank, the node of the pool. Two of them may be on one machine.
        label: of the processes, for the error.

    Raises:
        PlacementError: two ranks of a node share a device.
    """
    found: dict[Any, dict[str, list[str]]] = {node: {} for node in nodes}
    for rank, (own, node) in enumerate(zip(reserved, nodes, strict=True)):
        for resource, ids in own.items():
            shared = [one for one in ids if one in found[node].get(resource, ())]
            if shared:
                raise PlacementError(
                    f"{label}-{rank} shares {resource} {', '.join(shared)} with another process of its role, so its "
                    "local rank names no device; give each process a whole one with resource(accelerator=1), or leave "
                    "out disable_ray_auto_visible_device() and rank_based_gpu_selection"
                )
            found[node].setdefault(resource, []).extend(map(str, ids))
    return [found[node] for node in nodes]


def nodes_of(pool: RayResourcePool) -> list[str]:
    """Return Ray's id of the node of every slot."""
    from ray.util.placement_group import placement_group_table

    slots = pool.slots()
    tables = {slot.group.id: placement_group_table(slot.group)["bundles_to_node_id"] for slot in slots}
    return [tables[slot.group.id][slot.bundle] for slot in slots]
