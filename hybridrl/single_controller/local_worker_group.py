"""`LocalWorkerGroup`: a group of one worker in the calling process (`trainer.backend=local`).

Same calls and results as `RayWorkerGroup`, without Ray, so that `pdb` works.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.single_controller.endpoints import find_function
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S, Invocation
from hybridrl.single_controller.monitoring.tracing import call_span
from hybridrl.single_controller.placement.node_slots import ResourcePool
from hybridrl.single_controller.references import OutputRefs, materialize, resolve_awaitable
from hybridrl.single_controller.worker import RankInfo, Worker
from hybridrl.single_controller.worker_group import Arguments, ClassWithInitArgs, W, WorkerGroup
from hybridrl.system.rendezvous import reserve_address


class LocalWorkerGroup(WorkerGroup[W]):
    """A group of one worker.

    Every call completes before it returns, also `submit` and non-blocking ones.
    """

    def __init__(
        self, resource_pool: ResourcePool | None, ray_cls_with_init: ClassWithInitArgs[W], *, role: str = "worker"
    ) -> None:
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ConfigError(
                f"trainer.backend=local runs one worker, but the pool has {resource_pool.world_size}; "
                "set trainer.n_gpus_per_node=1 trainer.nnodes=1, or trainer.backend=ray"
            )
        super().__init__(ray_cls_with_init.cls, role=role, world_size=1)
        _set_single_rank()
        self.worker: Any = ray_cls_with_init()
        if isinstance(self.worker, Worker):
            self.worker.fused_worker_dict = {role: self.worker}

    def start_calls(
        self,
        method: str,
        ranks: Sequence[int],
        arguments: Sequence[Arguments],
        *,
        invocation: Invocation | None = None,
        with_num_rows: bool = False,
    ) -> OutputRefs:
        invocation = invocation or self.invocations.get(method)
        takes_futures = invocation is not None and not invocation.materialize_futures
        with call_span(self.role, 0, method):
            args, kwargs = arguments[0] if takes_futures else materialize(*arguments[0])
            function = find_function(self.worker, method, self.attributes.get(method, method), of=f"{self.role}-0")
            output = resolve_awaitable(function(*args, **kwargs))
        sizes = [len(output)] if with_num_rows and hasattr(output, "__len__") else None
        return OutputRefs([output], ranks=[0], fetch=list, sizes=sizes)

    def fetch(
        self, references: list[Any], *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        return list(references)

    def as_futures(self, references: Sequence[Any]) -> list[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in references]
        for future, value in zip(futures, references, strict=True):
            future.set_result(value)
        return futures

    def put(self, value: Any) -> Any:
        return value

    def put_each(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def shutdown(self) -> None:
        self.worker = None


def launch_locally(
    classes: Mapping[str, ClassWithInitArgs[Any]],
    pools: Mapping[str, ResourcePool],
    *,
    group_cls: type[LocalWorkerGroup[Any]] = LocalWorkerGroup,
) -> dict[str, LocalWorkerGroup[Any]]:
    """Return one worker group per role, all in this process; the counterpart of `launch`.

    Args:
        classes: Role -> worker class.
        pools: Role -> pool.
        group_cls: Class of the groups.
    """
    return {role: group_cls(pools[role], recipe, role=role) for role, recipe in classes.items()}


def _set_single_rank() -> None:
    """Set rank 0 of 1 in the environment, unless a launcher or another local group set a rank."""
    if "RANK" not in os.environ:
        host, port = reserve_address("127.0.0.1")
        rank_info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr=host, master_port=port)
        os.environ.update(rank_info.environment())
