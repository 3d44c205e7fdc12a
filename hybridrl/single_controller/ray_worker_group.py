"""`RayWorkerGroup`: a worker group whose workers are processes on Ray.

    pool = RayResourcePool([8, 8])                                                  # 8 slots on each of two nodes
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Scorer, path), role="scorer")
    scores = group.score(batch)

The processes may hold several roles (see `colocation.py`); `spawn` gives one group per role over the same processes. A
detached group outlives its driver, and `from_detached` finds it again. Starting and ending processes is
`worker_processes.py`, waiting `waiting.py`.

Several roles in one process per device: `create_colocated_worker_cls`, used as verl's users know it.

    roles = {"actor_rollout": RayClassWithInitArgs(...), "critic": RayClassWithInitArgs(...)}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), role="actor_rollout+critic")
    groups = group.spawn(roles)         # {"actor_rollout": group, "critic": group}
    group.fuse(roles)                   # or: group.actor_rollout, group.critic

Inside a process, `worker.fused_worker_dict` holds all its workers by role. One process is cheaper (one CUDA context,
one torch import) and one crash takes all its roles; `trainer.colocate=device` gives every role its own process on the
same device instead.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from hybridrl.data_plane.batches import is_batch, size_in_bytes
from hybridrl.single_controller.awaiting import LONGER, Fetch, gather
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S
from hybridrl.single_controller.monitoring.snapshot_store import HOLD_S
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.liveness import AlivenessWatch
from hybridrl.single_controller.processes.reattach import take_up_processes
from hybridrl.single_controller.processes.worker_host import CONCURRENT
from hybridrl.single_controller.processes.worker_processes import START_TIMEOUT_S, WorkerProcesses, named_host
from hybridrl.single_controller.references import References
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs, W, WorkerGroup

# Values smaller than a message are cheaper to send with the call than to share through the object store.
INLINE_TYPES = (type(None), bool, int, float, str, bytes)
# Writing to the object store leaves Python's lock alone; more threads than this find the memory bus full.
PUT_THREADS = 4
PUT_IN_PARALLEL_BYTES = 4 * 1024**2


class RayClassWithInitArgs(ClassWithInitArgs[W]):
    """A worker class with its constructor's arguments. A class made by `ray.remote` is taken as the class it wraps."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any):
        metadata = getattr(cls, "__ray_metadata__", None)
        super().__init__(metadata.modified_class if metadata is not None else cls, *args, **kwargs)
        self.additional_resources: dict[str, float] = {}
        self.options: dict[str, Any] = {}

    def set_additional_resource(self, resources: dict[str, float]) -> None:
        """Ask for further resources for each worker, for instance `{"accelerator_type:H100": 0.001}`."""
        self.additional_resources.update(resources)

    def update_options(self, options: dict[str, Any]) -> None:
        """Change the Ray actor options of each worker, for instance `{"runtime_env": {"nsight": "default"}}`."""
        self.options.update(options)

    def recipes(self, role: str) -> dict[str, ClassWithInitArgs]:
        """Return what to construct in each process, by role."""
        return {role: ClassWithInitArgs(self.cls, *self.args, **self.kwargs)}

    @property
    def actor_options(self) -> dict[str, Any]:
        """All options of the Ray actor."""
        resources = {**self.options.get("resources", {}), **self.additional_resources}
        return self.options | ({"resources": resources} if resources else {})


class RayWorkerGroup(WorkerGroup[W]):
    """Worker processes of one role, or of several that share processes.

    name_prefix: the job; processes are called `{name_prefix}/{role}-{rank}`. share: part of each slot that a process
    takes, when several groups live on one pool; default: one of the pool's `max_colocate_count` parts. detached: the
    processes outlive this driver, as the pool must too. worker_env: environment of the processes, set before anything
    is imported. take_up: go on with the processes that an earlier driver of this job has left here, if they are all
    there and were ready (`mark_ready`); `is_new` tells. timeout_s: for starting.
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
        take_up: bool = False,
        timeout_s: float = START_TIMEOUT_S,
    ):
        if detached and not resource_pool.detached:
            raise ValueError(
                f"detached=True, but pool {resource_pool.name_prefix!r} ends with this driver; make it "
                "with detached=True"
            )
        self.recipes = ray_cls_with_init.recipes(role)
        how: dict[str, Any] = {
            "label": role,
            "name_prefix": name_prefix or f"job-{uuid.uuid4().hex[:6]}",
            "share": share or 1 / resource_pool.max_colocate_count,
            "options": ray_cls_with_init.actor_options | ({"lifetime": "detached"} if detached else {}),
            "environment": worker_env or {},
        }
        processes = take_up_processes(resource_pool, self.recipes, **how) if take_up else None
        processes = processes or WorkerProcesses.start(resource_pool, self.recipes, timeout_s=timeout_s, **how)
        self._join(processes, ray_cls_with_init.cls, role=role)

    def _join(self, processes: WorkerProcesses, worker_cls: type[W], *, role: str) -> None:
        super().__init__(worker_cls, role=role, world_size=len(processes.hosts))
        self.is_new = processes.is_new
        self.processes = processes
        self._watch: AlivenessWatch | None = None

    def mark_ready(self) -> None:
        for host in self.processes.hosts:
            host.mark_ready.remote(self.role)

    @classmethod
    def over(cls, processes: WorkerProcesses, worker_cls: type[W], *, role: str) -> Self:
        """Return the group of one role that these processes hold already."""
        group = cls.__new__(cls)
        group._join(processes, worker_cls, role=role)
        return group

    @classmethod
    def from_detached(
        cls,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence | None = None,
        *,
        role: str | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Return a group over processes that are running, named as `worker_names` of the group that started them, or as
        Ray actors.

        role: which one, if the processes hold several. Raises PlacementError when a process is not there or ranks are
        missing.
        """
        if not worker_names and not worker_handles:
            raise ValueError(
                "say which processes: worker_names=[...] as group.worker_names gave them, or worker_handles=[...]"
            )
        hosts = list(worker_handles or map(named_host, worker_names or ()))
        processes = WorkerProcesses.attach(
            hosts, worker_names or [f"worker-{i}" for i in range(len(hosts))], timeout_s=timeout_s
        )
        role = role or next(iter(processes.classes))
        if role not in processes.classes:
            raise ValueError(f"the processes hold the roles {sorted(processes.classes)}, not {role!r}")
        return cls.over(processes, processes.classes[role], role=role)

    # -- calls

    def _submit(
        self, method: str, ranks: Sequence[int], args: Sequence[tuple], kwargs: Sequence[dict], *, sized: bool = False
    ) -> References:
        if self._watch is not None and self._watch.lost is not None:
            raise self._watch.lost
        invocation = self.invocations.get(method)
        options: dict[str, Any] = {"num_returns": 2} if sized else {}
        if invocation is not None and invocation.concurrency > 1:
            options["concurrency_group"] = CONCURRENT
        answers = []
        for rank, own_args, own_kwargs in zip(ranks, args, kwargs, strict=True):
            host = self.processes.hosts[rank]
            call = host.call_sized if sized else host.call
            call = call.options(**options) if options else call
            answers.append(call.remote(self.processes.life, self.role, method, *own_args, **own_kwargs))
        values, sizes = zip(*answers, strict=True) if sized else (answers, None)
        return self._references(method, ranks, values, sizes)

    def ask_through(self, memory: Any, method: str) -> References:
        """Call a method on all ranks, without arguments, in the name of a `JobMemory`: the answers then outlive this
        driver.
        """
        import ray

        answers = ray.get(memory.ask.remote(self.workers, self.processes.life, self.role, method), timeout=HOLD_S)
        return self._references(method, range(self.world_size), *answers)

    def _references(self, method: str, ranks: Sequence[int], values: Sequence, sizes: Sequence | None) -> References:
        rank_of = {value.hex(): rank for value, rank in zip(values, ranks, strict=True)}
        invocation = self.invocations.get(method)
        timeout_s = DEFAULT_TIMEOUT_S if invocation is None else invocation.timeout_s
        return References(
            values,
            ranks=ranks,
            fetch=Fetch(self.role, method, rank_of, self.processes.addresses, timeout_s),
            sizes=sizes,
        )

    def fetch(self, references: list, *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list:
        ranks = references.ranks if isinstance(references, References) else None
        return gather(references, ranks, role=self.role, method=method, timeout_s=timeout_s, way_out=LONGER)

    def put(self, value: Any) -> Any:
        import ray

        return value if isinstance(value, (*INLINE_TYPES, ray.ObjectRef)) else ray.put(value)

    def put_each(self, values: Sequence) -> list:
        """Put large values side by side; small ones travel with their call."""
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

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, "RayWorkerGroup"]:
        """Return one group per role over the same processes. A role the processes do not hold is a ValueError."""
        classes = self.processes.classes
        unknown = set(prefix_set) - set(classes)
        if unknown:
            raise ValueError(f"the processes hold the roles {sorted(classes)}, not {sorted(unknown)}")
        return {role: RayWorkerGroup.over(self.processes, classes[role], role=role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Give this group one attribute per role, so that `group.actor.update(batch)` calls the actor in these
        processes.
        """
        for role, group in self.spawn(prefix_set).items():
            if hasattr(self, role):
                raise ValueError(f"role {role!r} has the name of something the group has already; use spawn")
            setattr(self, role, group)

    # -- processes

    @property
    def workers(self) -> list:
        """The Ray actors of the group, by rank."""
        return self.processes.hosts

    @property
    def worker_names(self) -> list[str]:
        """The names of the processes, by rank; `from_detached` finds them by these."""
        return self.processes.names

    @property
    def process_ids(self) -> list[int]:
        return self.processes.process_ids

    @property
    def master_address(self) -> str:
        return self.processes.master[0]

    @property
    def master_port(self) -> int:
        return self.processes.master[1]

    def busy_seconds(self) -> list[dict[str, float]]:
        """Return, per rank, the seconds its process has spent inside each `role.method`."""
        return self.fetch(
            [host.busy_seconds.remote() for host in self.workers], method="busy_seconds", timeout_s=START_TIMEOUT_S
        )

    def start_worker_aliveness_check(
        self, every_n_seconds: float = 1.0, on_lost: Callable[[Exception], None] | None = None
    ) -> None:
        """Watch the processes from a thread, also while nobody calls: a death is logged, told to `on_lost`, and fails
        the next call.
        """
        if self._watch is None:
            self._watch = AlivenessWatch(self.workers, self.processes.label, every_s=every_n_seconds, on_lost=on_lost)

    def respawn(self, rank: int) -> None:
        """Start a new process in place of one that died or hangs, on its slot; its workers are constructed and have
        done nothing yet.

        For workers that do not talk to each other: the others know nothing of it.
        """
        self.processes.respawn(rank)

    def rebuild(self) -> None:
        """Start new processes in place of all of the group's, on their slots; every role they hold is constructed and
        has done nothing yet.

        For workers that talk to each other, when one of them died or hangs. Answers that were given before stay.
        """
        self.processes.rebuild()

    def shutdown(self) -> None:
        """End the group's processes, whatever they are doing, and with them every role they hold."""
        if self._watch is not None:
            self._watch.stop()
        self.processes.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()


class ColocatedWorker(Worker):
    """Stands for several roles in one process; it has no methods of its own to call, its roles' groups have."""


class ColocatedClassWithInitArgs(RayClassWithInitArgs):
    """The recipes of all roles that share a process."""

    def __init__(self, class_dict: dict[str, RayClassWithInitArgs]):
        super().__init__(ColocatedWorker)
        self.class_dict = class_dict
        for recipe in class_dict.values():
            self.set_additional_resource(recipe.additional_resources)
            self.update_options(recipe.options)

    def recipes(self, role: str) -> dict[str, ClassWithInitArgs]:
        return {role: recipe.recipes(role)[role] for role, recipe in self.class_dict.items()}


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Return one recipe that makes every role's worker in the same process, in the order of the mapping."""
    if not class_dict:
        raise ValueError("class_dict is empty: name at least one role with its class")
    return ColocatedClassWithInitArgs(class_dict)


# verl's spellings of the same: its two kinds of shared processes differ in how calls are forwarded, which users do not
# see here.
create_colocated_worker_cls_fused = create_colocated_worker_raw_cls = create_colocated_worker_cls
