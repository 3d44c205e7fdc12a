"""Handles that a `BaseTrainer` calls: `RoleGroupProxy` for all processes of a role, `WorkloadHandle` for one.

Both are thin: every call goes through the role's worker group, which a recovery updates in place.
"""

from collections.abc import Callable
from typing import Any

from hybridrl.sdk.first_generation.pre_post import with_proxy
from hybridrl.sdk.first_generation.workload_invocation import trainer_invocation
from hybridrl.single_controller.invocation import MAGIC_ATTR, Invocation, endpoints_of
from hybridrl.single_controller.worker_group import WorkerGroup

# How a method without a mark is called: as DLRover does, with the defaults of `trainer_invocation`.
DEFAULT_INVOCATION: Invocation = getattr(trainer_invocation()(lambda: None), MAGIC_ATTR)


class RemoteMethod:
    """One method of one process: `handle.method.remote(...)` starts it and returns Ray's reference to its output."""

    def __init__(self, group: WorkerGroup, rank: int, name: str) -> None:
        self._group, self._rank, self._name = group, rank, name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._group.execute_rank_async(self._rank, self._name, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self._group.role}-{self._rank}.{self._name}() runs in another process; write "
            f".{self._name}.remote(...), which returns a reference, or call it through RG_{self._group.role.upper()}"
        )


class WorkloadHandle:
    """One process of a role, with the methods of its workload.

    Like a Ray actor's handle; calls have no deadline.

    Attributes:
        worker_group: The group of all processes of the role.
        rank: Rank of this one.
    """

    def __init__(self, group: WorkerGroup, rank: int) -> None:
        self.worker_group, self.rank = group, rank

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteMethod(self.worker_group, self.rank, name)

    def __repr__(self) -> str:
        return f"<{self.worker_group.role}-{self.rank}>"


class RoleGroupProxy:
    """All processes of a role: `trainer.RG_ACTOR.update(batch)` calls `update` as its decorator says.

    A method without a decorator is called with the defaults of `trainer_invocation`. `RG_ACTOR.update.submit(batch)`
    returns references whatever the decorator says.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group, self.role, self.world_size = group, group.role, group.world_size
        self._endpoints = endpoints_of(group.worker_cls)

    def __len__(self) -> int:
        return self.world_size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        _, invocation = self._endpoints.get(name, (name, None))
        if invocation is None and not callable(getattr(self._group.worker_cls, name, None)):
            offered = {n for n in dir(self._group.worker_cls) if not n.startswith("_")} | set(self._endpoints)
            raise AttributeError(
                f"role {self.role!r}: {self._group.worker_cls.__name__} has no method {name!r}; it has "
                f"{', '.join(sorted(offered))}"
            )
        call = self._group.bind(name, with_proxy(invocation or DEFAULT_INVOCATION, self))
        self.__dict__[name] = call
        return call

    def __repr__(self) -> str:
        return f"<RG_{self.role.upper()}: {self.world_size} processes>"
