"""`RayWorkerGroup`: a worker group whose workers are processes on Ray. Used in the driver.

    pool = RayResourcePool([8, 8])                                                  # 8 slots on each of two nodes
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Scorer, path), role="scorer")
    scores = group.score(batch)

A detached group outlives its driver; `from_detached` finds it again. Processes are started and ended in
`processes/worker_processes.py`, and awaited in `awaiting.py`.

Several roles can share one process per device, with verl's names:

    roles = {"actor_rollout": RayClassWithInitArgs(...), "critic": RayClassWithInitArgs(...)}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), role="actor_rollout+critic")
    groups = group.spawn(roles)         # one group per role: {"actor_rollout": group, "critic": group}
    group.fuse(roles)                   # or: group.actor_rollout, group.critic

`worker.fused_worker_dict` holds all workers of a process by role. A shared process saves memory (one CUDA context, one
torch import), but a crash loses all its roles. `trainer.colocate=device` gives every role its own process on the same
device instead.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from hybridrl.data_plane.batches import is_batch, size_in_bytes
from hybridrl.errors import ConfigError
from hybridrl.single_controller.awaiting import TIMEOUT_HINT, ShardFetcher, wait_all
from hybridrl.single_controller.cluster import get_value
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S, Invocation
from hybridrl.single_controller.monitoring.process import lost_reason
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.host_start import ProcessRecipe, actor_options, find_host, worker_environment
from hybridrl.single_controller.processes.liveness import LivenessChecker
from hybridrl.single_controller.processes.reattach import reattach_processes
from hybridrl.single_controller.processes.worker_host import CallHeader
from hybridrl.single_controller.processes.worker_processes import START_TIMEOUT_S, WorkerProcesses
from hybridrl.single_controller.references import OutputRefs
from hybridrl.single_controller.worker import RANK_VARIABLES, Worker
from hybridrl.single_controller.worker_group import Arguments, ClassWithInitArgs, W, WorkerGroup
from hybridrl.single_controller.worker_group import RayClassWithInitArgs as RayClassWithInitArgs

# Small values are cheaper to send with the call than to share through the object store.
INLINE_TYPES = (type(None), bool, int, float, str, bytes)
# Writes to the object store release the GIL; more threads than this are limited by memory bandwidth.
PUT_THREADS = 4
PUT_IN_PARALLEL_BYTES = 4 * 1024**2


def _check_environment(variables: Mapping[str, str]) -> None:
    """Raise ValueError for variables that every process gets from its rank, such as WORLD_SIZE."""
    if taken := sorted(variables.keys() & RANK_VARIABLES):
        raise ValueError(
            f"worker_env sets {', '.join(f'{name}={variables[name]}' for name in taken)}: each process gets "
            f"{', '.join(taken)} from its rank in the group; leave them out of worker_env"
        )


class RayWorkerGroup(WorkerGroup[W]):
    """Worker processes of one role, or of several roles that share processes.

    Args:
        name_prefix: name of the job; processes are named `{name_prefix}/{role}-{rank}`.
        share: fraction of each slot that a process takes; default `1 / max_colocate_count` of the pool.
        detached: the processes outlive this driver; needs a detached pool.
        worker_env: environment of the processes, set before any import; without the variables of a rank.
        reattach: use the processes that a previous driver of this job started, if all still run and were marked ready
            (`mark_ready`). Otherwise start new ones; `is_new` says which.
        timeout_s: seconds for starting the processes.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs[W],
        *,
        role: str = "worker",
        name_prefix: str | None = None,
        share: float | None = None,
        detached: bool = False,
        worker_env: Mapping[str, str] | None = None,
        reattach: bool = False,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        if detached and not resource_pool.detached:
            raise ValueError(
                f"detached=True, but pool {resource_pool.name_prefix!r} ends with this driver; create it with "
                "detached=True"
            )
        _check_environment(worker_env or {})
        others = ColocatedClassWithInitArgs(getattr(ray_cls_with_init.cls, "class_dict", {}))
        run, share = name_prefix or f"job-{uuid.uuid4().hex[:6]}", share or 1 / resource_pool.max_colocate_count
        workers, environment = ray_cls_with_init.recipes(role) | others.recipes(role), worker_env or {}
        lifetime = {"lifetime": "detached"} if detached else {}
        options = others.actor_options | ray_cls_with_init.actor_options | lifetime
        options = actor_options(resource_pool, workers, share=share, options=options, environment=environment)
        recipe = ProcessRecipe(run, role, workers, share, options, worker_environment(run, environment))
        processes = reattach_processes(resource_pool, recipe) if reattach else None
        processes = processes or WorkerProcesses.start(resource_pool, recipe, timeout_s=timeout_s)
        self._use_processes(processes, ray_cls_with_init.cls, role=role)

    def _use_processes(self, processes: WorkerProcesses, worker_cls: type[W], *, role: str) -> None:
        self.processes = processes
        super().__init__(worker_cls, role=role, world_size=len(processes.hosts))
        self.is_new = processes.is_new
        self._liveness: LivenessChecker | None = None

    def mark_ready(self) -> None:
        for host in self.processes.hosts:
            host.mark_ready.remote(self.role)

    @classmethod
    def from_processes(cls, processes: WorkerProcesses, worker_cls: type[W], *, role: str) -> Self:
        """Return a group for one of the roles in running processes."""
        group = cls.__new__(cls)
        group._use_processes(processes, worker_cls, role=role)
        return group

    @classmethod
    def from_detached(
        cls,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        *,
        role: str | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Return a group over running processes, given by name or as Ray actors.

        Args:
            worker_names: `worker_names` of the group that started them, in any order.
            role: which one, if the processes have several; default the first.

        Raises:
            PlacementError: a process is not running, or ranks are missing.
        """
        if not worker_names and not worker_handles:
            raise ValueError(
                "name the processes: worker_names=group.worker_names of the group that started them, or "
                "worker_handles=[...]"
            )
        hosts = list(worker_handles or map(find_host, worker_names or ()))
        processes = WorkerProcesses.attach(
            hosts, worker_names or [f"worker-{i}" for i in range(len(hosts))], timeout_s=timeout_s
        )
        role = role or next(iter(processes.classes))
        if role not in processes.classes:
            raise ValueError(f"the processes have the roles {sorted(processes.classes)}, not {role!r}")
        return cls.from_processes(processes, processes.classes[role], role=role)

    # -- calls

    def start_calls(
        self,
        method: str,
        ranks: Sequence[int],
        arguments: Sequence[Arguments],
        *,
        invocation: Invocation | None = None,
        with_num_rows: bool = False,
    ) -> OutputRefs:
        if self._liveness is not None and self._liveness.lost is not None:
            raise self._liveness.lost
        invocation = invocation or self.invocations.get(method)
        options: dict[str, Any] = {"num_returns": 2} if with_num_rows else {}
        concurrency_group = None if invocation is None else invocation.used_concurrency_group
        if concurrency_group is not None:
            options["concurrency_group"] = concurrency_group
        header = self._header(method, concurrency_group)
        outputs = []
        for rank, (args, kwargs) in zip(ranks, arguments, strict=True):
            host = self.processes.hosts[rank]
            call = host.call_with_num_rows if with_num_rows else host.call
            call = call.options(**options) if options else call
            outputs.append(call.remote(header, *args, **kwargs))
        values, sizes = zip(*outputs, strict=True) if with_num_rows else (outputs, None)
        return self._references(method, ranks, values, sizes, invocation=invocation)

    def _header(self, method: str, concurrency_group: str | None = None) -> list[Any]:
        return list(CallHeader(self.processes.fencing_token, self.role, method, concurrency_group))

    def check_callable(self, name: str, invocation: Invocation) -> None:
        # Ray ends a process that is called in a concurrency group that it does not have.
        needed = invocation.used_concurrency_group
        if needed is not None and needed not in self.processes.concurrency_groups:
            raise ConfigError(
                f"{self.role}.{name} needs the concurrency group {needed!r}, but its processes have "
                f"{sorted(self.processes.concurrency_groups) or 'none'}; start them with "
                f"update_options({{'concurrency_groups': {{{needed!r}: {invocation.concurrency}}}}})"
            )

    def call_through_actor(self, store: Any, method: str, *, timeout_s: float) -> OutputRefs:
        """Have a `SnapshotStore` actor call a method on all ranks, so that the outputs outlive this driver.

        Raises:
            CallTimeout: The actor does not answer; names the actor.
            ray.exceptions.RayActorError: The actor is lost.
        """
        call = store.call.remote(self.workers, self._header(method))
        answer = get_value(call, what=f"the snapshot store's call of {self.role}.{method}()", timeout_s=timeout_s)
        return self._references(method, range(self.world_size), *answer)

    def _references(
        self,
        method: str,
        ranks: Sequence[int],
        values: Sequence[Any],
        sizes: Sequence[Any] | None,
        *,
        invocation: Invocation | None = None,
    ) -> OutputRefs:
        rank_of = {value.hex(): rank for value, rank in zip(values, ranks, strict=True)}
        invocation = invocation or self.invocations.get(method)
        timeout_s = DEFAULT_TIMEOUT_S if invocation is None else invocation.timeout_s
        return OutputRefs(
            values,
            ranks=ranks,
            fetch=ShardFetcher(self.role, method, rank_of, self.processes.addresses, self.deadline_s(timeout_s)),
            sizes=sizes,
        )

    def fetch(
        self, references: list[Any], *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        ranks = references.ranks if isinstance(references, OutputRefs) else None
        deadline_s = self.deadline_s(timeout_s)
        return wait_all(references, ranks, role=self.role, method=method, timeout_s=deadline_s, hint=TIMEOUT_HINT)

    def as_futures(self, references: Sequence[Any]) -> "list[Future[Any]]":
        return [reference.future() for reference in references]

    def is_lost(self, reference: Any) -> bool:
        return lost_reason(reference) is not None

    def put(self, value: Any) -> Any:
        import ray

        return value if isinstance(value, (*INLINE_TYPES, ray.ObjectRef)) else ray.put(value)

    def put_each(self, values: Sequence[Any]) -> list[Any]:
        """Put large values into the object store in parallel; send small ones with their call."""
        import ray

        large = [
            i for i, value in enumerate(values) if is_batch(value) and size_in_bytes(value) > PUT_IN_PARALLEL_BYTES
        ]
        if len(large) < 2:
            return list(values)
        with ThreadPoolExecutor(min(len(large), PUT_THREADS)) as threads:
            references = dict(zip(large, threads.map(ray.put, [values[i] for i in large]), strict=True))
        return [references.get(i, value) for i, value in enumerate(values)]

    # -- roles that share processes

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, "RayWorkerGroup[Any]"]:
        """Return one group per role over the same processes; raise ValueError for a role they do not have."""
        classes = self.processes.classes
        unknown = set(prefix_set) - set(classes)
        if unknown:
            raise ValueError(f"the processes have the roles {sorted(classes)}, not {sorted(unknown)}")
        return {role: RayWorkerGroup.from_processes(self.processes, classes[role], role=role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Add one attribute per role to this group, so that `group.actor.update(batch)` calls the actor."""
        for role, group in self.spawn(prefix_set).items():
            if hasattr(self, role):
                raise ValueError(f"role {role!r} would hide an attribute of the group; use spawn")
            setattr(self, role, group)

    # -- processes

    @property
    def workers(self) -> list[Any]:
        """The Ray actors of the group, by rank."""
        return self.processes.hosts

    @property
    def worker_names(self) -> list[str]:
        """The names of the processes, by rank, for `from_detached`."""
        return self.processes.names

    @property
    def process_ids(self) -> list[int]:
        return self.processes.process_ids

    @property
    def master_address(self) -> str:
        return self.processes.rendezvous_address[0]

    @property
    def master_port(self) -> int:
        return self.processes.rendezvous_address[1]

    def busy_seconds(self) -> list[dict[str, float]]:
        """Return, per rank, the seconds its process has spent inside each `role.method`."""
        return self.fetch(
            [host.busy_seconds.remote() for host in self.workers], method="busy_seconds", timeout_s=START_TIMEOUT_S
        )

    def start_worker_aliveness_check(
        self, every_n_seconds: float = 1.0, on_lost: Callable[[Exception], None] | None = None
    ) -> None:
        """Check in a thread that the processes are alive, also between calls.

        A death is logged and passed to `on_lost`, and the next call raises it.
        """
        if self._liveness is None:
            self._liveness = LivenessChecker(
                self.workers, self.processes.label, period_s=every_n_seconds, on_lost=on_lost
            )

    def respawn(self, *ranks: int) -> None:
        """Replace these processes on their slots, with newly constructed workers.

        For workers that do not communicate with the others, which are not affected (`Worker.num_peers`).
        """
        self.processes.respawn(*ranks)

    def rebuild(self) -> None:
        """Replace all processes of the group on their slots, with newly constructed workers of every role.

        For workers that communicate with each other, when one of them died or hangs. Earlier outputs stay available.
        """
        self.processes.rebuild()

    def shutdown(self) -> None:
        """Kill the group's processes, and with them every role that they have."""
        if self._liveness is not None:
            self._liveness.stop()
        self.processes.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class ColocatedWorker(Worker):
    """Placeholder class of a process with several roles; their methods are on the groups that `spawn` returns."""


class ColocatedClassWithInitArgs(RayClassWithInitArgs[ColocatedWorker]):
    """The recipes of all roles that share a process."""

    def __init__(self, class_dict: dict[str, RayClassWithInitArgs[Any]]) -> None:
        super().__init__(ColocatedWorker)
        self.class_dict = class_dict
        groups: dict[str, int] = {}
        for recipe in class_dict.values():
            self.set_additional_resource(recipe.additional_resources)
            self.update_options(recipe.options)
            for name, threads in recipe.options.get("concurrency_groups", {}).items():
                groups[name] = max(threads, groups.get(name, 0))
        if groups:
            self.update_options({"concurrency_groups": groups})

    def recipes(self, role: str) -> dict[str, ClassWithInitArgs[Any]]:
        return {role: recipe.recipes(role)[role] for role, recipe in self.class_dict.items()}


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs[Any]]) -> RayClassWithInitArgs[Any]:
    """Return one recipe that constructs every role's worker in the same process, in the order of the mapping."""
    if not class_dict:
        raise ValueError("class_dict is empty: name at least one role with its class")
    return ColocatedClassWithInitArgs(class_dict)


# verl has two kinds of shared processes, which differ in how calls are forwarded; here they are the same.
create_colocated_worker_cls_fused = create_colocated_worker_cls


class FusedWorker(Worker):
    """A worker that has the other workers of its process as attributes, by role.

    They are there when all of them are constructed.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self.fused_worker_dict:
            return self.fused_worker_dict[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}; its process has {sorted(self.fused_worker_dict)}")


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs[Any]]) -> type[FusedWorker]:
    """Return a base class for a worker that calls these ones in its own process, as in `self.critic.values(batch)`."""
    return type("FusedWorker", (FusedWorker,), {"class_dict": class_dict})
