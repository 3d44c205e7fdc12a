"""`LocalWorkerGroup`: the in-process twin of a group, for a world of one.

Same calls, same results, no Ray: `pdb` works.
"""

import os
from collections.abc import Sequence
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S
from hybridrl.single_controller.monitoring.tracing import call_span
from hybridrl.single_controller.placement.resource_pool import ResourcePool
from hybridrl.single_controller.references import References, finish, materialize
from hybridrl.single_controller.worker import Worker, WorkerPlace
from hybridrl.single_controller.worker_group import ClassWithInitArgs, W, WorkerGroup, free_port


class LocalWorkerGroup(WorkerGroup[W]):
    """A group of one worker in the calling process. A call is over when it returns, also one that does not wait."""

    def __init__(
        self, resource_pool: ResourcePool | None, ray_cls_with_init: ClassWithInitArgs[W], *, role: str = "worker"
    ):
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ConfigError(
                f"trainer.backend=local runs one worker, but the pool has {resource_pool.world_size}; "
                "set trainer.n_gpus_per_node=1 trainer.nnodes=1, or trainer.backend=ray"
            )
        super().__init__(ray_cls_with_init.cls, role=role, world_size=1)
        _enter_world_of_one()
        self.worker: Any = ray_cls_with_init()
        if isinstance(self.worker, Worker):
            self.worker.fused_worker_dict = {role: self.worker}

    def _submit(
        self, method: str, ranks: Sequence[int], args: Sequence[tuple], kwargs: Sequence[dict], *, sized: bool = False
    ) -> References:
        invocation = self.invocations.get(method)
        takes_futures = invocation is not None and not invocation.materialize_futures
        with call_span(self.role, 0, method):
            own_args, own_kwargs = (args[0], kwargs[0]) if takes_futures else materialize(args[0], kwargs[0])
            answer = finish(getattr(self.worker, method)(*own_args, **own_kwargs))
        return References(
            [answer], ranks=[0], fetch=list, sizes=[len(answer)] if sized and hasattr(answer, "__len__") else None
        )

    def fetch(self, references: list, *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list:
        return list(references)

    def put(self, value: Any) -> Any:
        return value

    def put_each(self, values: Sequence) -> list:
        return list(values)

    def shutdown(self) -> None:
        self.worker = None


def _enter_world_of_one() -> None:
    """Give this process a rank, unless it has one (a launcher's, or another local group's)."""
    if "RANK" not in os.environ:
        place = WorkerPlace(
            rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=free_port()
        )
        os.environ.update(place.environment())
