"""`WorkerProcesses`: the `WorkerHost` actors behind one or several worker groups, held by the driver.

They are started on a pool, or attached to by name. Starting creates one process per slot and gets a rendezvous address
from rank 0. Then all processes are set up in parallel. On an error, all of them are killed. The recipes define their
roles; `ray_worker_group.py` calls them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from hybridrl.errors import CallTimeout, PlacementError
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.invocation import CONTROL
from hybridrl.single_controller.monitoring.process import PROCESS, PartTimes
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.array_store import DRIVER, share_arrays
from hybridrl.single_controller.processes.host_start import ProcessRecipe, node_devices, nodes_of, start_host
from hybridrl.single_controller.processes.termination import kill_actors, kill_processes
from hybridrl.single_controller.worker import RankInfo, Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs

SETUP_HINT = (
    "; a process imports its libraries in this time, so the machine may be overloaded, or its network was down: let it "
    "run less beside this job, lower the number of processes, or run `ray start` with RAY_worker_niceness=0 in its "
    "environment (with Ray's 15 workers yield to all other programs), and start the same command again"
)
# Starting a process and importing torch takes seconds; minutes mean that the node does not answer.
START_TIMEOUT_S = 300.0
RESTART_TIMEOUT_S = 100.0  # for Ray to start a process where one has run before


@dataclass
class WorkerProcesses:
    """The processes of a group.

    Attributes:
        label: the roles, joined by "+".
        addresses: actor id (hex) -> (label, rank), also of the processes that were replaced last: results of theirs
            may still be awaited.
        hosts, names, process_ids, nodes: by rank; nodes are Ray's ids.
        classes: role -> worker class.
        rendezvous_address: host and port at which rank 0 listens.
        pool, recipe: None if another driver started the processes.
        fencing_token: of this driver.
        is_new: False after attaching.
        ready: roles that were marked ready when this driver attached.
        replaced: rank -> actor id (hex) of its previous process.
        concurrency_groups: names of the concurrency groups that every process has.
        times: seconds of the restarts so far, by part.
    """

    label: str
    hosts: list[Any]
    names: list[str]
    classes: dict[str, type[Any]]
    process_ids: list[int] = field(default_factory=list)
    rendezvous_address: tuple[str, int] = ("", 0)
    pool: RayResourcePool | None = None
    recipe: ProcessRecipe | None = None
    nodes: list[str] = field(default_factory=list)
    fencing_token: int = 1
    is_new: bool = True
    ready: frozenset[str] = frozenset()
    replaced: dict[int, str] = field(default_factory=dict)
    concurrency_groups: frozenset[str] = frozenset()
    times: PartTimes = field(default_factory=PartTimes)

    def __post_init__(self) -> None:
        self.addresses = {host._actor_id.hex(): (self.label, rank) for rank, host in enumerate(self.hosts)}
        self._register()

    def _register(self) -> None:
        names = {host._actor_id.hex(): name for host, name in zip(self.hosts, self.names, strict=True)}
        PROCESS.register_actors(self.addresses, names if CONTROL in self.concurrency_groups else {})
        if PROCESS.worker is None:
            share_arrays(*DRIVER)

    @classmethod
    def start(cls, pool: RayResourcePool, recipe: ProcessRecipe, *, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start one process per slot and construct its workers; on an error, kill all processes before raising it."""
        names = [recipe.name(rank) for rank in range(pool.world_size)]
        pool.acquire_share(recipe.group_name, recipe.share)
        hosts: list[Any] = []
        try:
            for name, slot in zip(names, pool.slots(), strict=True):
                hosts.append(start_host(name, slot, recipe.options))
            started = cls(
                recipe.label,
                hosts,
                names,
                {role: worker.cls for role, worker in recipe.workers.items()},
                pool=pool,
                recipe=recipe,
                nodes=nodes_of(pool),
                concurrency_groups=frozenset(recipe.options.get("concurrency_groups", ())),
            )
            started._set_up(range(len(hosts)), started.times, timeout_s=timeout_s)
            return started
        except BaseException:
            kill_actors(hosts)
            pool.release_share(recipe.group_name)
            raise

    def _set_up(self, ranks: Sequence[int], times: PartTimes, *, timeout_s: float) -> None:
        """Give new processes their ranks, and construct their workers."""
        recipe, pool = self._require_startable(ranks[0])
        num_peers = process_group_size(recipe.workers, num_ranks=len(self.hosts), label=self.label)
        with times.part("start"):
            addresses = self._open_rendezvous(pool, ranks, num_peers, timeout_s=timeout_s)
        recipes = cloudpickle.dumps(recipe.workers)
        local = list(zip(pool.local_rank_list, pool.local_world_size_list, strict=True))
        devices = self._node_devices(pool, timeout_s=timeout_s)
        calls = []
        for rank in ranks:
            place = rank, len(self.hosts), *local[rank], *addresses[rank], num_peers
            rank_info = RankInfo(*place, pool.rank_environment(rank), devices[rank])
            calls.append(self.hosts[rank].setup.remote(recipes, rank_info, recipe.environment))
        with times.part("import"):
            found = wait_all(calls, ranks, role=self.label, method="setup", timeout_s=timeout_s, hint=SETUP_HINT)
        process_ids = dict(enumerate(self.process_ids)) | dict(zip(ranks, found, strict=True))
        self.process_ids = [process_ids[rank] for rank in range(len(self.hosts))]

    def _open_rendezvous(
        self, pool: RayResourcePool, ranks: Sequence[int], num_peers: int, *, timeout_s: float
    ) -> dict[int, tuple[str, int]]:
        """Return the address at which the first rank of each rank's process group listens.

        The first rank of a whole group opens a new one. Without all of its ranks the address stays.
        """
        size = num_peers or len(self.hosts)
        first_ranks = [rank for rank in ranks if rank % size == 0 and (num_peers or len(ranks) == size)]
        local = list(zip(pool.local_rank_list, pool.local_world_size_list, strict=True))
        calls = [
            self.hosts[rank].rendezvous.remote(one_machine=local[rank][0] + size <= local[rank][1])
            for rank in first_ranks
        ]
        found = wait_all(calls, first_ranks, role=self.label, method="rendezvous", timeout_s=timeout_s, hint=SETUP_HINT)
        addresses = dict(zip(first_ranks, found, strict=True))
        self.rendezvous_address = addresses.get(0, self.rendezvous_address)
        return {rank: addresses.get(rank - rank % size, self.rendezvous_address) for rank in ranks}

    def _node_devices(self, pool: RayResourcePool, *, timeout_s: float) -> list[dict[str, list[str]] | None]:
        """Return the devices that each rank sees, if it sees those of its node; else None.

        Raises:
            PlacementError: two ranks share a device, so that it has no local rank of its own.
        """
        if not pool.sees_node_devices:
            return [None] * len(self.hosts)
        calls = [host.reserved_devices.remote() for host in self.hosts]
        reserved = wait_all(calls, role=self.label, method="reserved_devices", timeout_s=timeout_s, hint=SETUP_HINT)
        return node_devices(reserved, [slot.group.id for slot in pool.slots()], label=self.label)

    def respawn(self, *ranks: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Kill these processes and start new ones on the same slots, with newly constructed workers.

        For processes that do not communicate with the other ranks, which are not informed: with a process group of
        their own, all of its ranks. A new process has the old one's name with the number of its incarnation after a
        dot.

        Raises:
            ValueError: some ranks of a process group are missing.
            PlacementError: another driver started the processes, a slot's node was lost and no other node has free
                capacity, or a node does not start a process within `RESTART_TIMEOUT_S`.
        """
        self._restart(ranks, PartTimes(), timeout_s=timeout_s)

    def rebuild(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Kill all processes and start new ones on the same slots, with a new rendezvous address.

        For groups whose processes communicate with each other: a process group cannot continue with a new peer. Names
        and errors as for `respawn`. The seconds are counted in `times`.
        """
        self._restart(range(len(self.hosts)), self.times, timeout_s=timeout_s)

    def _restart(self, ranks: Sequence[int], times: PartTimes, *, timeout_s: float) -> None:
        recipe, pool = self._require_startable(ranks[0])
        num_peers = process_group_size(recipe.workers, num_ranks=len(self.hosts), label=self.label)
        check_whole_groups(ranks, num_peers, label=self.label)
        with times.part("kill"):
            kill_actors([self.hosts[rank] for rank in ranks])
            kill_processes([(self.nodes[rank], self.process_ids[rank]) for rank in ranks])
        pool.replace_lost_nodes()
        self._start_replacements(ranks, recipe, pool)
        with times.part("start"):
            self._await_start(ranks, timeout_s=min(timeout_s, RESTART_TIMEOUT_S))
        self._set_up(ranks, times, timeout_s=timeout_s)

    def _await_start(self, ranks: Sequence[int], *, timeout_s: float) -> None:
        """Wait until the nodes have started these processes; raises PlacementError after `timeout_s`.

        Another restart on the same nodes would not help, but a new job may.
        """
        calls = [self.hosts[rank].__ray_ready__.remote() for rank in ranks]
        try:
            wait_all(calls, ranks, role=self.label, method="start", timeout_s=timeout_s)
        except CallTimeout as error:
            late = ", ".join(f"{self.label}-{rank} on node {self.nodes[rank]}" for rank in error.ranks)
            raise PlacementError(
                f"Ray has not started new processes in {timeout_s:g} s: {late}; the machine may lack memory or process "
                "ids, see raylet.err in its Ray logs; start the same command again: it resumes from its newest "
                "checkpoint"
            ) from error

    def split_model_time(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Split the seconds of the part "model" as the slowest rank measured them."""
        calls = [host.start_times.remote() for host in self.hosts]
        found = wait_all(calls, role=self.label, method="start_times", timeout_s=timeout_s, hint=SETUP_HINT)
        names = dict.fromkeys(name for times in found for name in times)
        self.times.split("model", {name: max(times.get(name, 0.0) for times in found) for name in names})

    def _require_startable(self, rank: int) -> tuple[ProcessRecipe, RayResourcePool]:
        if self.recipe is None or self.pool is None:
            raise PlacementError(f"{self.names[rank]} was started by another driver; only that driver can restart it")
        return self.recipe, self.pool

    def _start_replacements(self, ranks: Iterable[int], recipe: ProcessRecipe, pool: RayResourcePool) -> None:
        slots = pool.slots()
        self.nodes = nodes_of(pool)
        for rank in ranks:
            self._forget([self.replaced.get(rank, "")])
            self.replaced[rank] = self.hosts[rank]._actor_id.hex()
            recipe.incarnations[rank] = recipe.incarnations.get(rank, 1) + 1
            self.names[rank] = recipe.name(rank)
            self.hosts[rank] = start_host(self.names[rank], slots[rank], recipe.options)
            if self.fencing_token > 1:
                self.hosts[rank].accept_driver.remote(self.fencing_token)  # runs before any later call
            self.addresses[self.hosts[rank]._actor_id.hex()] = (self.label, rank)
        self._register()

    def _forget(self, actor_ids: Sequence[str]) -> None:
        for actor_id in actor_ids:
            self.addresses.pop(actor_id, None)
        PROCESS.forget_actors(actor_ids)

    @classmethod
    def attach(cls, hosts: Sequence[Any], names: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Return the running processes of a group, given in any order.

        Raises:
            PlacementError: some of the group's processes are not given.
        """
        found = wait_all(
            [host.describe.remote() for host in hosts], role="worker", method="describe", timeout_s=timeout_s
        )
        ranks = [entry["rank_info"].rank for entry in found]
        first: RankInfo = found[0]["rank_info"]
        if sorted(ranks) != list(range(first.world_size)):
            raise PlacementError(
                f"{list(names)} are the ranks {sorted(ranks)} of {first.world_size}; name every process of "
                "the group once"
            )
        order = [ranks.index(rank) for rank in range(first.world_size)]
        classes = cloudpickle.loads(found[0]["classes"])
        ids = [found[i]["process_id"] for i in order]
        address = (first.master_addr, first.master_port)
        attached = cls(
            "+".join(classes), [hosts[i] for i in order], [names[i] for i in order], classes, ids, address, is_new=False
        )
        attached.nodes = [found[i]["node"] for i in order]
        attached.fencing_token = max(entry["fencing_token"] for entry in found)
        attached.concurrency_groups = frozenset(found[0]["concurrency_groups"])
        attached._register()
        attached.ready = frozenset.intersection(*(frozenset(entry["ready"]) for entry in found))
        return attached

    def shutdown(self) -> None:
        """Kill the processes, also if they are frozen, and release their share of the pool."""
        kill_actors(self.hosts)
        kill_processes(zip(self.nodes, self.process_ids, strict=False))  # no ids if setup failed
        self._forget(list(self.addresses))
        self.hosts.clear()
        self.process_ids = []
        if self.pool is not None:
            self.pool.release_share(self.names[0].rpartition("-")[0])


def process_group_size(recipes: Mapping[str, ClassWithInitArgs[Any]], *, num_ranks: int, label: str) -> int:
    """Return how many adjacent ranks share a torch process group, as `Worker.num_peers` of the roles says.

    0 stands for all: one of the roles needs all, or the roles differ.

    Raises:
        PlacementError: the ranks cannot be divided into such groups.
    """
    sizes = {
        recipe.cls.num_peers(*recipe.args, **recipe.kwargs) if issubclass(recipe.cls, Worker) else 0
        for recipe in recipes.values()
    }
    size = sizes.pop() if len(sizes) == 1 else 0
    if size and num_ranks % size:
        raise PlacementError(
            f"{label} has {num_ranks} processes, and {size} of them share a process group; start a multiple of {size}"
        )
    return size


def check_whole_groups(ranks: Sequence[int], size: int, *, label: str) -> None:
    """Raise ValueError unless these ranks form whole process groups of `size`; 0 for one of all ranks."""
    if size and set(ranks) != {rank - rank % size + i for rank in ranks for i in range(size)}:
        raise ValueError(f"{label}: {size} ranks share a process group; name all of them, not only {sorted(ranks)}")
