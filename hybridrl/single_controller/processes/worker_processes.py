"""`WorkerProcesses`: the `WorkerHost` actors behind one or several worker groups, held by the driver.

They are started on a pool, or attached to by name. Starting creates one process per slot and gets a rendezvous address
from rank 0. Then all processes are set up in parallel. On an error, all of them are killed. The recipes define their
roles; `ray_worker_group.py` calls them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import cloudpickle

from hybridrl.errors import PlacementError
from hybridrl.single_controller.awaiting import register_actors, wait_all
from hybridrl.single_controller.invocation import CONTROL
from hybridrl.single_controller.monitoring.part_times import PartTimes
from hybridrl.single_controller.monitoring.process_state import PROCESS
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.host_start import (
    actor_options,
    node_devices,
    nodes_of,
    start_host,
    worker_environment,
)
from hybridrl.single_controller.processes.process_groups import first_ranks_of, process_group_size
from hybridrl.single_controller.processes.termination import kill_actors, kill_processes
from hybridrl.single_controller.worker import RankInfo
from hybridrl.single_controller.worker_group import ClassWithInitArgs

SETUP_HINT = (
    "; a process imports its libraries in this time, so the machine may be overloaded: let it run less beside this "
    "job, or lower the number of processes, and start the same command again"
)
# Starting a process and importing torch takes seconds; minutes mean that the node does not answer.
START_TIMEOUT_S = 300.0


@dataclass
class WorkerProcesses:
    """The processes of a group.

    Attributes:
        label: the roles, joined by "+".
        addresses: actor id (hex) -> (label, rank), also of the processes that were replaced last: results of theirs
            may still be awaited.
        hosts, names, process_ids, rank_infos, nodes: by rank; nodes are Ray's ids.
        classes: role -> worker class.
        rendezvous_address: host and port at which rank 0 listens.
        restart_recipe: None if another driver started the processes.
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
    rank_infos: list[RankInfo] = field(default_factory=list)
    restart_recipe: "RestartRecipe | None" = None
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
        register_actors(self.addresses)
        if CONTROL in self.concurrency_groups:
            names = {host._actor_id.hex(): name for host, name in zip(self.hosts, self.names, strict=True)}
            with PROCESS.lock:
                PROCESS.answering.update(names)

    @classmethod
    def start(
        cls,
        pool: RayResourcePool,
        recipes: Mapping[str, ClassWithInitArgs[Any]],
        *,
        label: str,
        name_prefix: str,
        share: float,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start one process per slot and construct its workers; on an error, kill all processes before raising it.

        Args:
            share: fraction of its slot that a process takes.
            options: further options of the Ray actors.
            environment: set in the processes before any import.
        """
        names = [f"{name_prefix}/{label}-{rank}" for rank in range(pool.world_size)]
        options = actor_options(pool, recipes, share=share, options=options, environment=environment)
        pool.acquire_share(f"{name_prefix}/{label}", share)
        hosts: list[Any] = []
        try:
            for name, slot in zip(names, pool.slots(), strict=True):
                hosts.append(start_host(name, slot, options))
            started = cls(
                label,
                hosts,
                names,
                {role: recipe.cls for role, recipe in recipes.items()},
                pool=pool,
                nodes=nodes_of(pool),
                concurrency_groups=frozenset(options.get("concurrency_groups", ())),
            )
            environment = worker_environment(name_prefix, environment)
            started._set_up(pool, recipes, environment, timeout_s=timeout_s)
            started.restart_recipe = RestartRecipe(dict(recipes), options, environment)
            return started
        except BaseException:
            kill_actors(hosts)
            pool.release_share(f"{name_prefix}/{label}")
            raise

    def _set_up(
        self,
        pool: RayResourcePool,
        recipes: Mapping[str, ClassWithInitArgs[Any]],
        environment: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> None:
        import ray

        num_peers = process_group_size(recipes, num_ranks=len(self.hosts), label=self.label)
        size = num_peers or len(self.hosts)
        with self.times.part("start"):
            addresses = self._open_rendezvous(pool, range(0, len(self.hosts), size), size, timeout_s=timeout_s)
        pickled_recipes = ray.put(cloudpickle.dumps(dict(recipes)))
        local = zip(pool.local_rank_list, pool.local_world_size_list, strict=True)
        devices = self._node_devices(pool, timeout_s=timeout_s)
        self.rank_infos = [
            RankInfo(
                rank,
                len(self.hosts),
                *local_ranks,
                *addresses[rank - rank % size],
                num_peers,
                pool.rank_environment(rank),
                devices[rank],
            )
            for rank, local_ranks in enumerate(local)
        ]
        calls = [
            host.setup.remote(pickled_recipes, rank_info, environment)
            for host, rank_info in zip(self.hosts, self.rank_infos, strict=True)
        ]
        with self.times.part("import"):
            self.process_ids = wait_all(calls, role=self.label, method="setup", timeout_s=timeout_s, hint=SETUP_HINT)

    def _open_rendezvous(
        self, pool: RayResourcePool, first_ranks: Sequence[int], size: int, *, timeout_s: float
    ) -> dict[int, tuple[str, int]]:
        """Return, for the first rank of each process group of `size` ranks, the address at which it listens."""
        if not first_ranks:
            return {}
        local = list(zip(pool.local_rank_list, pool.local_world_size_list, strict=True))
        calls = [
            self.hosts[rank].rendezvous.remote(one_machine=local[rank][0] + size <= local[rank][1])
            for rank in first_ranks
        ]
        found = wait_all(calls, first_ranks, role=self.label, method="rendezvous", timeout_s=timeout_s)
        addresses = dict(zip(first_ranks, found, strict=True))
        self.rendezvous_address = addresses.get(0, self.rendezvous_address)
        return addresses

    def _node_devices(self, pool: RayResourcePool, *, timeout_s: float) -> list[dict[str, list[str]] | None]:
        """Return the devices that each rank sees, if it sees those of its node; else None.

        Raises:
            PlacementError: two ranks share a device, so that it has no local rank of its own.
        """
        if not pool.sees_node_devices:
            return [None] * len(self.hosts)
        calls = [host.reserved_devices.remote() for host in self.hosts]
        reserved = wait_all(calls, role=self.label, method="reserved_devices", timeout_s=timeout_s)
        return node_devices(reserved, [slot.group.id for slot in pool.slots()], label=self.label)

    def respawn(self, *ranks: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Kill these processes and start new ones on the same slots, with newly constructed workers.

        For processes that do not communicate with the other ranks, which are not informed: with a process group of
        their own, all of its ranks. A new process has the old one's name with the number of its incarnation after a
        dot.

        Raises:
            ValueError: some ranks of a process group are missing.
            PlacementError: another driver started the processes, or a slot's node was lost and no other node has free
                capacity.
        """
        recipe, pool = self._require_startable(ranks[0])
        size = process_group_size(recipe.recipes, num_ranks=len(self.hosts), label=self.label)
        first_ranks = first_ranks_of(ranks, size, label=self.label) if size else []
        self._kill_and_confirm(ranks)
        pool.replace_lost_nodes()
        self._start_replacements(ranks, recipe, pool)
        addresses = self._open_rendezvous(pool, first_ranks, size, timeout_s=timeout_s)
        devices = self._node_devices(pool, timeout_s=timeout_s)
        for rank in ranks:
            info = self.rank_infos[rank]
            host, port = addresses[rank - rank % size] if size else (info.master_addr, info.master_port)
            self.rank_infos[rank] = replace(info, devices=devices[rank], master_addr=host, master_port=port)
        recipes = cloudpickle.dumps(recipe.recipes)
        calls = [self.hosts[rank].setup.remote(recipes, self.rank_infos[rank], recipe.environment) for rank in ranks]
        process_ids = wait_all(calls, ranks, role=self.label, method="setup", timeout_s=timeout_s, hint=SETUP_HINT)
        for rank, process_id in zip(ranks, process_ids, strict=True):
            self.process_ids[rank] = process_id

    def rebuild(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Kill all processes and start new ones on the same slots, with a new rendezvous address.

        For groups whose processes communicate with each other: a process group cannot continue with a new peer. Names
        and errors as for `respawn`.
        """
        recipe, pool = self._require_startable(0)
        self._kill_and_confirm(list(range(len(self.hosts))))
        pool.replace_lost_nodes()
        self._start_replacements(range(len(self.hosts)), recipe, pool)
        self._set_up(pool, recipe.recipes, recipe.environment, timeout_s=timeout_s)

    def split_model_time(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Split the seconds of the part "model" as the slowest rank measured them."""
        calls = [host.start_times.remote() for host in self.hosts]
        found = wait_all(calls, role=self.label, method="start_times", timeout_s=timeout_s)
        names = dict.fromkeys(name for times in found for name in times)
        self.times.split("model", {name: max(times.get(name, 0.0) for times in found) for name in names})

    def _kill_and_confirm(self, ranks: Sequence[int]) -> None:
        with self.times.part("kill"):
            kill_actors([self.hosts[rank] for rank in ranks])
            kill_processes([(self.nodes[rank], self.process_ids[rank]) for rank in ranks])

    def _require_startable(self, rank: int) -> "tuple[RestartRecipe, RayResourcePool]":
        if self.restart_recipe is None or self.pool is None:
            raise PlacementError(f"{self.names[rank]} was started by another driver; only that driver can restart it")
        return self.restart_recipe, self.pool

    def _start_replacements(self, ranks: Iterable[int], recipe: "RestartRecipe", pool: RayResourcePool) -> None:
        slots = pool.slots()
        self.nodes = nodes_of(pool)
        for rank in ranks:
            self._forget([self.replaced.get(rank, "")])
            self.replaced[rank] = self.hosts[rank]._actor_id.hex()
            incarnation = recipe.incarnations[rank] = recipe.incarnations.get(rank, 1) + 1
            run = self.names[rank].split(f"/{self.label}-")[0]
            self.names[rank] = f"{run}/{self.label}-{rank}.{incarnation}"
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
        attached.rank_infos = [found[i]["rank_info"] for i in order]
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


@dataclass
class RestartRecipe:
    """How to start the processes again, and how often each rank was started."""

    recipes: dict[str, ClassWithInitArgs[Any]]
    options: dict[str, Any]
    environment: dict[str, str]
    incarnations: dict[int, int] = field(default_factory=dict)
