"""`Plan`: the processes of a job and where each runs: placement groups, slots, ranks, device shares, environments.

    plan = plan_job(spec, job="grpo-1")                 # master/plan/planner.py, from a JobSpec
    show(plan_table(plan))                  # master/plan/plan_table.py
    check_feasible(plan.reservations(), nodes)          # placement/feasibility.py
    groups = launch(plan, classes, make_pools(plan))    # launch.py

Pure records: they start nothing, and need neither Ray nor torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Environment variable of DLRover with the roles that share a device.
COLLOCATION_VARIABLE = "DEVICE_COLLOCATION_GROUP"
NO_CUSTOM_RESOURCE = ("CPU", "GPU", "memory")  # options of a Ray actor with names of their own


@dataclass(frozen=True)
class Reservation:
    """A placement group to reserve: bundles on one node, one per slot.

    Attributes:
        bundles: Ray's names of resources -> amounts, memory in bytes.
        labels: label selector of Ray that the node must match.
        apart_from: names of pools that must not share the node. With the own name, each of the pool's reservations is
            on another node.
        spread: put the pool's reservations on different nodes while there are enough nodes.
        hint: what the user may change when no node can hold it.
        preferred_node: Ray's id of a node to use if it has free capacity; "" for any.
    """

    name: str
    pool: str
    bundles: tuple[Mapping[str, float], ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    apart_from: tuple[str, ...] = ()
    spread: bool = False
    hint: str = ""
    preferred_node: str = ""

    @property
    def resources(self) -> dict[str, float]:
        """The sum over all bundles."""
        names = dict.fromkeys(name for bundle in self.bundles for name in bundle)
        return {name: round(sum(bundle.get(name, 0) for bundle in self.bundles), 4) for name in names}


@dataclass(frozen=True)
class PoolPlan:
    """The slots of a pool: one reservation per node, in the order of ranks.

    Attributes:
        strategy: as named in the job builder.
    """

    name: str
    reservations: tuple[Reservation, ...]
    strategy: str = "pack"

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Every slot as (node of the pool, slot on it), in order."""
        return [(node, slot) for node, one in enumerate(self.reservations) for slot in range(len(one.bundles))]


@dataclass(frozen=True)
class ProcessPlan:
    """Processes with the same roles, which form one world of ranks.

    Attributes:
        slots: by rank, (node of the pool, slot on it).
        resources: of each process, as in a bundle.
        share: fraction of its slot that a process takes.
        environment: further variables, set before any import.
        collocated: all roles that share its devices; empty if no others do.
        sees_node_devices: a process sees the devices of all of them on its node, by local rank.
    """

    pool: str
    roles: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    resources: Mapping[str, float]
    share: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    collocated: tuple[str, ...] = ()
    sees_node_devices: bool = False

    @property
    def label(self) -> str:
        """The roles, as in the names of the processes."""
        return "+".join(self.roles)

    def rank_environment(self, rank: int, name: str) -> dict[str, str]:
        """Return the environment variables of a rank, except MASTER_ADDR and MASTER_PORT, which are set at start.

        NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE count the nodes and ranks of these processes only.
        """
        nodes = [node for node, _ in self.slots]
        node = nodes[rank]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(nodes),
            "LOCAL_RANK": nodes[:rank].count(node),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "NODE_RANK": sorted(set(nodes)).index(node),
            "NAME": name,
            "ROLE": self.label.upper(),
        }
        shared = {COLLOCATION_VARIABLE: ",".join(role.upper() for role in self.collocated)} if self.collocated else {}
        return {variable: str(value) for variable, value in variables.items()} | shared


@dataclass(frozen=True)
class DriverPlan:
    """The process of a submitted job's trainer.

    Attributes:
        entry: `module:Class` or `file.py:Class`.
    """

    role: str
    entry: str
    reservation: Reservation
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerPlan:
    """One process: its name, roles, rank, slot and whole environment."""

    name: str
    roles: tuple[str, ...]
    rank: int
    pool: str
    reservation: str
    bundle: int
    resources: Mapping[str, float]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """All processes of a job.

    Attributes:
        job: prefix of their names.
        worker_env: environment variables of all of them.
    """

    job: str
    processes: tuple[ProcessPlan, ...]
    pools: tuple[PoolPlan, ...] = ()
    worker_env: Mapping[str, str] = field(default_factory=dict)
    driver: DriverPlan | None = None

    def pool(self, name: str) -> PoolPlan:
        return next(pool for pool in self.pools if pool.name == name)

    def reservations(self) -> list[Reservation]:
        """Return all reservations of the job, the trainer's included; a pool without processes has none."""
        own = [self.driver.reservation] if self.driver is not None else []
        used = {process.pool for process in self.processes}
        return own + [one for pool in self.pools if pool.name in used for one in pool.reservations]

    def workers(self) -> list[WorkerPlan]:
        """Return every worker process, by role and rank."""
        return [self._worker(process, rank) for process in self.processes for rank in range(len(process.slots))]

    def _worker(self, process: ProcessPlan, rank: int) -> WorkerPlan:
        node, bundle = process.slots[rank]
        name = f"{self.job}/{process.label}-{rank}"
        environment = {**self.worker_env, **process.environment, **process.rank_environment(rank, name)}
        reservation = self.pool(process.pool).reservations[node].name
        return WorkerPlan(name, process.roles, rank, process.pool, reservation, bundle, process.resources, environment)


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a Ray actor that takes these resources."""
    custom = {name: amount for name, amount in resources.items() if name not in NO_CUSTOM_RESOURCE}
    options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    if "memory" in resources:
        options["memory"] = resources["memory"]
    return options | ({"resources": custom} if custom else {})
