"""`RayWorkerGroup`: a worker group whose workers are processes on Ray.

Making a group: reserve the pool's bundles, start one `WorkerHost` per slot, ask rank 0 for an address, then tell all of them their
place at once. A host may hold several roles (see `colocation.py`); `spawn` gives one group per role over the same processes.
"""

import uuid
from collections.abc import Iterable
from typing import Any

from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S
from hybridrl.single_controller.resource_pool import RayResourcePool
from hybridrl.single_controller.waiting import gather
from hybridrl.single_controller.worker import WorkerPlace
from hybridrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup
from hybridrl.single_controller.worker_host import WorkerHost

# Starting a process and importing torch takes seconds; minutes mean that the node is not answering.
START_TIMEOUT_S = 300.0
# Values smaller than a message are cheaper to send with the call than to share through the object store.
INLINE_TYPES = (type(None), bool, int, float, str, bytes)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its constructor's arguments. A class made by `ray.remote` is taken as the class it wraps."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any):
        metadata = getattr(cls, "__ray_metadata__", None)
        super().__init__(metadata.modified_class if metadata is not None else cls, *args, **kwargs)
        self.additional_resources: dict[str, float] = {}
        self.options: dict[str, Any] = {}

    def set_additional_resource(self, resources: dict[str, float]) -> None:
        """Ask for further resources for each worker, for instance `{"accelerator_type:H100": 0.001}`."""
        self.additional_resources.update(resources)

    def update_options(self, options: dict[str, Any]) -> None:
        """Change the Ray actor options of each worker."""
        self.options.update(options)

    def recipes(self, role: str) -> dict[str, ClassWithInitArgs]:
        return {role: ClassWithInitArgs(self.cls, *self.args, **self.kwargs)}


class RayWorkerGroup(WorkerGroup):
    """Worker processes of one role, or of several that share processes.

    name_prefix: the job; processes are called `{name_prefix}/{role}-{rank}`. share: part of each slot that a process takes, when
    several groups live on one pool. worker_env: environment of the processes, set before anything is imported.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        *,
        role: str = "worker",
        name_prefix: str | None = None,
        share: float = 1.0,
        detached: bool = False,
        worker_env: dict[str, str] | None = None,
        hosts: list | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ):
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = name_prefix or f"job-{uuid.uuid4().hex[:6]}"
        self.worker_env = worker_env or {}
        self.hosts = hosts or []
        super().__init__(ray_cls_with_init.cls, role=role, world_size=len(self.hosts) or resource_pool.world_size)
        if not self.hosts:
            self._start(resource_pool, share=share, detached=detached, timeout_s=timeout_s)

    def _start(self, pool: RayResourcePool, *, share: float, detached: bool, timeout_s: float) -> None:
        import ray

        slots = [(group, bundle) for group in pool.get_placement_groups() for bundle in range(group.bundle_count)]
        recipes = ray.put(self.ray_cls_with_init.recipes(self.role))
        try:
            self.hosts = [
                self._start_host(rank, slot, recipes, options=self._options(pool, share=share, detached=detached))
                for rank, slot in enumerate(slots)
            ]
            self._set_up_hosts(pool, timeout_s=timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def _options(self, pool: RayResourcePool, *, share: float, detached: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": share, "num_gpus": share if pool.use_gpu else 0, "max_restarts": 0}
        if detached:
            options["lifetime"] = "detached"
        if self.worker_env:
            options["runtime_env"] = {"env_vars": self.worker_env}
        if self.ray_cls_with_init.additional_resources:
            options["resources"] = self.ray_cls_with_init.additional_resources
        return options | self.ray_cls_with_init.options

    def _start_host(self, rank: int, slot: tuple, recipes, *, options: dict[str, Any]):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, bundle = slot
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        name = f"{self.name_prefix}/{self.role}-{rank}"
        return ray.remote(WorkerHost).options(name=name, scheduling_strategy=where, **options).remote(recipes)

    def _set_up_hosts(self, pool: RayResourcePool, *, timeout_s: float) -> None:
        """Give every process its place; all construct their workers at the same time."""
        [(address, port)] = gather([self.hosts[0].rendezvous.remote()], role=self.role, method="rendezvous", timeout_s=timeout_s)
        ranks = zip(self.hosts, pool.local_rank_list, pool.local_world_size_list, strict=True)
        calls = [
            host.setup.remote(WorkerPlace(rank, self.world_size, local_rank, local_size, address, port), self.worker_env)
            for rank, (host, local_rank, local_size) in enumerate(ranks)
        ]
        self.process_ids = gather(calls, role=self.role, method="setup", timeout_s=timeout_s)

    def submit(self, rank: int, method: str, args: tuple, kwargs: dict) -> Any:
        return self.hosts[rank].call.remote(self.role, method, *args, **kwargs)

    def fetch(self, references: list, *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list:
        return gather(references, role=self.role, method=method, timeout_s=timeout_s)

    def put(self, value: Any) -> Any:
        import ray

        return value if isinstance(value, (*INLINE_TYPES, ray.ObjectRef)) else ray.put(value)

    def are_references(self, outputs: list) -> bool:
        import ray

        return all(isinstance(output, ray.ObjectRef) for output in outputs)

    def busy_seconds(self) -> list[dict[str, float]]:
        """Return, per rank, the seconds its process has spent inside each `role.method`."""
        return self.fetch([host.busy_seconds.remote() for host in self.hosts], method="busy_seconds", timeout_s=START_TIMEOUT_S)

    @property
    def workers(self) -> list:
        """The Ray actors of the group, by rank."""
        return self.hosts

    @property
    def worker_names(self) -> list[str]:
        return [f"{self.name_prefix}/{self.role}-{rank}" for rank in range(self.world_size)]

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.submit(0, method, args, kwargs)

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.fetch([self.execute_rank_zero_async(method, *args, **kwargs)], method=method)[0]

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list:
        """Run a method on every worker with the same arguments, and wait."""
        shared = [[self.put(a)] * self.world_size for a in args]
        shared_kwargs = {k: [self.put(v)] * self.world_size for k, v in kwargs.items()}
        return self.fetch(self.execute_all_async(method, *shared, **shared_kwargs), method=method)

    execute_rank_zero_sync = execute_rank_zero
    execute_all_sync = execute_all

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, "RayWorkerGroup"]:
        """Return one group per role over the same processes. A role the processes do not hold is a ValueError."""
        recipes = self.ray_cls_with_init.recipes(self.role)
        unknown = set(prefix_set) - set(recipes)
        if unknown:
            raise ValueError(f"the processes hold the roles {sorted(recipes)}, not {sorted(unknown)}")
        return {role: self._view(role, recipes[role]) for role in prefix_set}

    def _view(self, role: str, recipe: ClassWithInitArgs) -> "RayWorkerGroup":
        return RayWorkerGroup(
            ray_cls_with_init=RayClassWithInitArgs(recipe.cls, *recipe.args, **recipe.kwargs),
            role=role,
            name_prefix=self.name_prefix,
            worker_env=self.worker_env,
            hosts=self.hosts,
        )

    def shutdown(self) -> None:
        """End the group's processes, whatever they are doing."""
        import ray

        for host in self.hosts:
            ray.kill(host, no_restart=True)
        self.hosts = []
