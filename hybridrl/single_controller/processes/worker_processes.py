"""`WorkerProcesses`: the running `WorkerHost`s behind one or several worker groups. Started on a pool, or found again
by name.

Starting: one process per slot of the pool, rank 0 tells an address, then all are told their place and construct their
workers at once. Whatever goes wrong on the way, no process is left. Which roles they play is in the recipes; how roles
are called, `ray_worker_group.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from hybridrl.errors import PlacementError
from hybridrl.single_controller.awaiting import gather, introduce
from hybridrl.single_controller.cluster import NAMESPACE, find_actor, master_name
from hybridrl.single_controller.invocation import invocations_of
from hybridrl.single_controller.monitoring.heartbeat_client import MASTER_VARIABLE
from hybridrl.single_controller.placement.resource_pool import RayResourcePool, Slot
from hybridrl.single_controller.processes.termination import kill_actors, kill_processes
from hybridrl.single_controller.processes.worker_host import CONCURRENT, WorkerHost
from hybridrl.single_controller.worker import WorkerPlace
from hybridrl.single_controller.worker_group import ClassWithInitArgs

# Starting a process and importing torch takes seconds; minutes mean that the node is not answering.
START_TIMEOUT_S = 300.0


@dataclass
class WorkerProcesses:
    """label: the roles, joined by "+". hosts, names, process_ids: by rank. classes: worker class of each role."""

    label: str
    hosts: list
    names: list[str]
    classes: dict[str, type]
    process_ids: list[int] = field(default_factory=list)
    master: tuple[str, int] = ("", 0)
    pool: RayResourcePool | None = None
    places: list[WorkerPlace] = field(default_factory=list)
    start_again: "StartAgain | None" = None
    nodes: list[str] = field(default_factory=list)  # Ray's id of each process's node
    life: int = 1  # of the driver, as the processes know it
    is_new: bool = True
    ready: frozenset[str] = frozenset()  # roles whose workers had been marked so when they were attached to

    def __post_init__(self) -> None:
        self.addresses = {host._actor_id.hex(): (self.label, rank) for rank, host in enumerate(self.hosts)}
        introduce(self.addresses)

    @classmethod
    def start(
        cls,
        pool: RayResourcePool,
        recipes: Mapping[str, ClassWithInitArgs],
        *,
        label: str,
        name_prefix: str,
        share: float,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start one process per slot and construct the workers in them. A failure is raised when no process of them is
        left.

        share: of each slot. options: further options of the Ray actors. environment: set before anything is imported.
        """
        names = [f"{name_prefix}/{label}-{rank}" for rank in range(pool.world_size)]
        options = actor_options(pool, recipes, share=share, options=options, environment=environment)
        pool.take(f"{name_prefix}/{label}", share)
        hosts: list = []
        try:
            for name, slot in zip(names, pool.slots(), strict=True):
                hosts.append(_start_host(name, slot, options))
            started = cls(
                label,
                hosts,
                names,
                {role: recipe.cls for role, recipe in recipes.items()},
                pool=pool,
                nodes=_nodes_of(pool),
            )
            environment = environment_of(name_prefix, environment)
            started._set_up(pool, recipes, environment, timeout_s=timeout_s)
            started.start_again = StartAgain(dict(recipes), options, environment)
            return started
        except BaseException:
            kill_actors(hosts)
            pool.give_back(f"{name_prefix}/{label}")
            raise

    def _set_up(
        self,
        pool: RayResourcePool,
        recipes: Mapping[str, ClassWithInitArgs],
        environment: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> None:
        import ray

        [self.master] = gather(
            [self.hosts[0].rendezvous.remote()], role=self.label, method="rendezvous", timeout_s=timeout_s
        )
        parcel = ray.put(cloudpickle.dumps(dict(recipes)))
        local = zip(pool.local_rank_list, pool.local_world_size_list, strict=True)
        self.places = [
            WorkerPlace(rank, len(self.hosts), *here, *self.master, pool.place_environment(rank))
            for rank, here in enumerate(local)
        ]
        calls = [
            host.setup.remote(parcel, place, environment) for host, place in zip(self.hosts, self.places, strict=True)
        ]
        self.process_ids = gather(calls, role=self.label, method="setup", timeout_s=timeout_s)

    def respawn(self, *ranks: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """End these processes, whatever they are doing, and start new ones in their places, on the same slots and with
        the same workers.

        Each is called what the old one was called, with the number of its life behind a dot. Their peers are not told:
        this is for groups whose processes do not talk to each other. Raises PlacementError for processes that another
        driver started, and where a slot's node was lost and no other has room.
        """
        again, pool = self._require_own(ranks[0])
        self._end_for_certain(ranks)
        pool.move_from_lost_nodes()
        self._start_next_lives(ranks, again, pool)
        parcel = cloudpickle.dumps(again.recipes)
        calls = [self.hosts[rank].setup.remote(parcel, self.places[rank], again.environment) for rank in ranks]
        for rank, process_id in zip(
            ranks, gather(calls, ranks, role=self.label, method="setup", timeout_s=timeout_s), strict=True
        ):
            self.process_ids[rank] = process_id

    def rebuild(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """End all processes, whatever they are doing, and start new ones in their places, which meet at an address of
        their own.

        For groups whose processes talk to each other: those that are well cannot go on with a new peer. Names as in
        `respawn`.
        """
        again, pool = self._require_own(0)
        self._end_for_certain(list(range(len(self.hosts))))
        pool.move_from_lost_nodes()
        self._start_next_lives(range(len(self.hosts)), again, pool)
        self._set_up(pool, again.recipes, again.environment, timeout_s=timeout_s)

    def _end_for_certain(self, ranks: Sequence[int]) -> None:
        kill_actors([self.hosts[rank] for rank in ranks])
        kill_processes([(self.nodes[rank], self.process_ids[rank]) for rank in ranks])

    def _require_own(self, rank: int) -> "tuple[StartAgain, RayResourcePool]":
        if self.start_again is None or self.pool is None:
            raise PlacementError(f"{self.names[rank]} was started by another driver, which alone can start it again")
        return self.start_again, self.pool

    def _start_next_lives(self, ranks: Iterable[int], again: "StartAgain", pool: RayResourcePool) -> None:
        slots = pool.slots()
        for rank in ranks:
            again.lives[rank] = again.lives.get(rank, 1) + 1
            stem = self.names[rank].split(f"/{self.label}-")[0]
            self.names[rank] = f"{stem}/{self.label}-{rank}.{again.lives[rank]}"
            self.hosts[rank] = _start_host(self.names[rank], slots[rank], again.options)
            if self.life > 1:
                self.hosts[rank].obey.remote(self.life)  # in the order of calls: before any other
            self.addresses[self.hosts[rank]._actor_id.hex()] = (self.label, rank)
        self.nodes = _nodes_of(pool)
        introduce(self.addresses)

    @classmethod
    def attach(cls, hosts: Sequence, names: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Return the whole set of processes of which these are all, in any order.

        Raises PlacementError when some are missing.
        """
        found = gather(
            [host.describe.remote() for host in hosts], role="worker", method="describe", timeout_s=timeout_s
        )
        ranks = [entry["place"].rank for entry in found]
        place = found[0]["place"]
        if sorted(ranks) != list(range(place.world_size)):
            raise PlacementError(
                f"{list(names)} are the ranks {sorted(ranks)} of {place.world_size}; name every process of "
                "the group once"
            )
        order = [ranks.index(rank) for rank in range(place.world_size)]
        classes = cloudpickle.loads(found[0]["classes"])
        ids = [found[i]["process_id"] for i in order]
        master = (place.master_addr, place.master_port)
        attached = cls(
            "+".join(classes), [hosts[i] for i in order], [names[i] for i in order], classes, ids, master, is_new=False
        )
        attached.nodes, attached.places = [found[i]["node"] for i in order], [found[i]["place"] for i in order]
        attached.life = max(entry["life"] for entry in found)
        attached.ready = frozenset.intersection(*(frozenset(entry["ready"]) for entry in found))
        return attached

    def end(self) -> None:
        """End the processes, whatever they are doing and also if they are frozen, and give their share of the pool
        back.
        """
        kill_actors(self.hosts)
        kill_processes(zip(self.nodes, self.process_ids, strict=False))  # there are no ids where not all were set up
        self.hosts.clear()
        self.process_ids = []
        if self.pool is not None:
            self.pool.give_back(self.names[0].rpartition("-")[0])


@dataclass
class StartAgain:
    """How the processes were started, and how often each was."""

    recipes: dict[str, ClassWithInitArgs]
    options: dict[str, Any]
    environment: dict[str, str]
    lives: dict[int, int] = field(default_factory=dict)


def environment_of(run: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the processes of a run find in their environment, besides their place."""
    return {"WG_PREFIX": run, "WG_BACKEND": "ray", **_master_of(run), **environment}


def _master_of(run: str) -> dict[str, str]:
    """The environment that has a process report to the master of its job; empty for a job without one."""
    return {MASTER_VARIABLE: master_name(run)} if find_actor(master_name(run)) is not None else {}


def named_host(name: str):
    """Return the running process of this name. Raises PlacementError when there is none."""
    if (host := find_actor(name)) is None:
        raise PlacementError(f"no worker process called {name!r} is running on this cluster")
    return host


def actor_options(
    pool: RayResourcePool,
    recipes: Mapping[str, ClassWithInitArgs],
    *,
    share: float,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return the options of the Ray actors behind a group, see `start`."""
    chosen: dict[str, Any] = {"num_cpus": share, "num_gpus": share if pool.use_gpu else 0, "max_restarts": 0}
    threads = max(
        (call.concurrency for recipe in recipes.values() for call in invocations_of(recipe.cls).values()), default=1
    )
    if threads > 1:
        chosen["concurrency_groups"] = {CONCURRENT: threads}
    chosen |= options
    runtime_env = {**chosen.get("runtime_env", {})}
    if environment:
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **environment}
    return chosen | ({"runtime_env": runtime_env} if runtime_env else {})


def _start_host(name: str, slot: Slot, options: Mapping[str, Any]):
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=slot.group, placement_group_bundle_index=slot.bundle)
    actor = ray.remote(**options)(WorkerHost).options(name=name, namespace=NAMESPACE, scheduling_strategy=where)
    try:
        return actor.remote()
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise PlacementError(
            f"a worker process called {name!r} is running on this cluster already; attach to it with "
            "RayWorkerGroup.from_detached, "
            "end it, or choose another name_prefix"
        ) from None


def _nodes_of(pool: RayResourcePool) -> list[str]:
    """The node of every slot."""
    from ray.util.placement_group import placement_group_table

    slots = pool.slots()
    tables = {slot.group.id: placement_group_table(slot.group)["bundles_to_node_id"] for slot in slots}
    return [tables[slot.group.id][slot.bundle] for slot in slots]
