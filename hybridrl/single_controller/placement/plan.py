"""A `Plan` says which processes a job has and where each runs: placement groups, slots, ranks, shares of devices,
environments.

    plan = plan_job(spec, job="grpo-1")     # hybridrl/master/jobs/planner.py, from a JobSpec
    sys.stdout.write(plan_table(plan))      # plan_table.py
    check_plan(plan, machines)              # feasibility.py
    groups = launch(plan, classes, pools)   # launch.py

Pure records: nothing is started here, and neither Ray nor torch is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Where a process stands is told by the variables that torch.distributed reads, and by those that DLRover's users know.
COLLOCATION_VARIABLE = "DEVICE_COLLOCATION_GROUP"
NO_CUSTOM_RESOURCE = ("CPU", "GPU", "memory")  # Ray has options of their own for them


@dataclass(frozen=True)
class Reservation:
    """A placement group: bundles reserved together on one machine, one for each slot.

    bundles: Ray's names of resources -> amounts, memory in bytes. labels: what the machine's labels must be, as a label
    selector of Ray. apart_from: names of pools that have nothing on its machine; with its own, each of the pool's
    reservations is on another machine. spread: that too, but only where there are enough machines. way_out: what to
    change when no machine can hold it. rather_on: the node, by Ray's id, that it should be on if there is room; "" for
    any.
    """

    name: str
    pool: str
    bundles: tuple[Mapping[str, float], ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    apart_from: tuple[str, ...] = ()
    spread: bool = False
    way_out: str = ""
    rather_on: str = ""

    @property
    def resources(self) -> dict[str, float]:
        """What its machine has to have, all bundles together."""
        names = dict.fromkeys(name for bundle in self.bundles for name in bundle)
        return {name: round(sum(bundle.get(name, 0) for bundle in self.bundles), 4) for name in names}


@dataclass(frozen=True)
class PoolPlan:
    """The slots of a pool: its reservations, one for each of its nodes in the order of ranks.

    strategy: in the builder's words.
    """

    name: str
    reservations: tuple[Reservation, ...]
    strategy: str = "pack"

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Every slot as (node, slot on it), in order."""
        return [(node, slot) for node, one in enumerate(self.reservations) for slot in range(len(one.bundles))]


@dataclass(frozen=True)
class ProcessPlan:
    """Processes that hold the same roles: one world of ranks.

    slots: by rank, (node of the pool, slot on it). resources: of each process, as in a bundle. share: of its slot that
    one takes. environment: further variables, set before anything is imported. collocated: the roles that share its
    devices, if others do.
    """

    pool: str
    roles: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    resources: Mapping[str, float]
    share: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    collocated: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The roles, as they stand in the processes' names."""
        return "+".join(self.roles)

    def place_environment(self, rank: int, name: str) -> dict[str, str]:
        """Return the variables that tell a process where it stands; MASTER_ADDR and MASTER_PORT are known when it runs.

        NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE count the nodes and ranks of these processes, whatever else runs
        beside them.
        """
        nodes = [node for node, _ in self.slots]
        node = nodes[rank]
        place = {
            "RANK": rank,
            "WORLD_SIZE": len(nodes),
            "LOCAL_RANK": nodes[:rank].count(node),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "NODE_RANK": sorted(set(nodes)).index(node),
            "NAME": name,
            "ROLE": self.label.upper(),
        }
        shared = {COLLOCATION_VARIABLE: ",".join(role.upper() for role in self.collocated)} if self.collocated else {}
        return {variable: str(value) for variable, value in place.items()} | shared


@dataclass(frozen=True)
class DriverPlan:
    """The process of the trainer, which starts the others and tells them what to do.

    entry: `module:Class` or `file.py:Class`.
    """

    role: str
    entry: str
    reservation: Reservation
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerPlan:
    """One process: its name, its roles, its place in the group and on its pool, and its whole environment."""

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
    """All processes of a job. `job` prefixes their names, `worker_env` is set in each of them."""

    job: str
    processes: tuple[ProcessPlan, ...]
    pools: tuple[PoolPlan, ...] = ()
    worker_env: Mapping[str, str] = field(default_factory=dict)
    driver: DriverPlan | None = None

    def pool(self, name: str) -> PoolPlan:
        return next(pool for pool in self.pools if pool.name == name)

    def reservations(self) -> list[Reservation]:
        """Everything that the job reserves, the trainer's place included.

        A pool on which nothing runs reserves nothing.
        """
        own = [self.driver.reservation] if self.driver is not None else []
        used = {process.pool for process in self.processes}
        return own + [one for pool in self.pools if pool.name in used for one in pool.reservations]

    def workers(self) -> list[WorkerPlan]:
        """Every worker process, role by role in the order of ranks."""
        return [self._worker(process, rank) for process in self.processes for rank in range(len(process.slots))]

    def _worker(self, process: ProcessPlan, rank: int) -> WorkerPlan:
        node, bundle = process.slots[rank]
        name = f"{self.job}/{process.label}-{rank}"
        environment = {**self.worker_env, **process.environment, **process.place_environment(rank, name)}
        reservation = self.pool(process.pool).reservations[node].name
        return WorkerPlan(name, process.roles, rank, process.pool, reservation, bundle, process.resources, environment)


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a Ray actor that takes these resources."""
    custom = {name: amount for name, amount in resources.items() if name not in NO_CUSTOM_RESOURCE}
    options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    if "memory" in resources:
        options["memory"] = resources["memory"]
    return options | ({"resources": custom} if custom else {})
