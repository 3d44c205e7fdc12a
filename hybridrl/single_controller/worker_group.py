"""`WorkerGroup`: many workers called as one object, and `LocalWorkerGroup`, its in-process twin for a world of one.

A group binds every registered method of its worker class. Calling `group.method(...)` is: split the arguments (dispatch), run on
the workers (execute), wait in completion order (blocking), merge (collect). The twin runs the same four steps on a worker that
lives in the calling process, without Ray: `pdb` works, and everything above this layer cannot tell the difference.
"""

import functools
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hybridrl.errors import ConfigError
from hybridrl.single_controller.dispatch import get_dispatch_mode
from hybridrl.single_controller.invocation import Execute, Invocation, invocations_of
from hybridrl.single_controller.worker import WorkerPlace

W = TypeVar("W")


class ClassWithInitArgs(Generic[W]):
    """A worker class and the arguments it will be made with, elsewhere and later."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any):
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)


class WorkerGroup(ABC):
    """The caller's side of a group. Subclasses say where workers live: `submit`, `fetch`, `put`, `are_references`."""

    def __init__(self, worker_cls: type, *, role: str, world_size: int):
        self.worker_cls, self.role, self.world_size = worker_cls, role, world_size
        self._dp_layouts: dict[str, tuple[list[int], list[bool]]] = {}
        for name, invocation in invocations_of(worker_cls).items():
            setattr(self, name, self._bind(name, invocation))

    def _bind(self, name: str, invocation: Invocation) -> Callable:
        mode = get_dispatch_mode(invocation.dispatch)

        @functools.wraps(getattr(self.worker_cls, name))
        def call(*args: Any, **kwargs: Any) -> Any:
            if invocation.execute == Execute.RANK_ZERO:
                outputs = [self.submit(0, name, args, kwargs)]
            else:
                args, kwargs = mode.dispatch_fn(self, *args, **kwargs)
                outputs = self.execute_all_async(name, *args, **kwargs)
            if invocation.blocking:
                outputs = self.fetch(outputs, method=name, timeout_s=invocation.timeout_s)
            return outputs[0] if invocation.execute == Execute.RANK_ZERO else mode.collect_fn(self, outputs)

        return call

    def dp_layout(self, mesh_name: str) -> tuple[list[int], list[bool]]:
        """Return, per worker, its data-parallel rank on a mesh and whether its answer is collected; asked once, then remembered."""
        if mesh_name not in self._dp_layouts:
            places = self.query_mesh_place(mesh_name)
            self._dp_layouts[mesh_name] = ([rank for rank, _ in places], [keep for _, keep in places])
        return self._dp_layouts[mesh_name]

    def execute_all_async(self, method: str, *args: Sequence, **kwargs: Sequence) -> list:
        """Submit a method to every worker; each argument is a list with one entry per worker. Returns one reference each."""
        return [
            self.submit(rank, method, tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()})
            for rank in range(self.world_size)
        ]

    @abstractmethod
    def submit(self, rank: int, method: str, args: tuple, kwargs: dict) -> Any:
        """Start a method on one worker; return its answer, or a reference to it."""

    @abstractmethod
    def fetch(self, references: list, *, method: str = "get", timeout_s: float | None = None) -> list:
        """Wait for the answers behind the references, one per worker, in worker order."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Return what stands for a value that several workers get: one copy, shared."""

    @abstractmethod
    def are_references(self, outputs: list) -> bool:
        """Return whether outputs are still to be fetched."""


class LocalWorkerGroup(WorkerGroup):
    """A group of one worker in the calling process. Same calls, same results, no Ray."""

    def __init__(self, resource_pool: Any = None, ray_cls_with_init: ClassWithInitArgs | None = None, *, role: str = "worker", **_: Any):
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ConfigError(
                f"trainer.backend=local runs one worker, but the pool has {resource_pool.world_size}; "
                "set trainer.n_gpus_per_node=1 trainer.nnodes=1, or trainer.backend=ray"
            )
        super().__init__(ray_cls_with_init.cls, role=role, world_size=1)
        _enter_world_of_one()
        self.worker = ray_cls_with_init()

    def submit(self, rank: int, method: str, args: tuple, kwargs: dict) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)

    def fetch(self, references: list, *, method: str = "get", timeout_s: float | None = None) -> list:
        return references

    def put(self, value: Any) -> Any:
        return value

    def are_references(self, outputs: list) -> bool:
        return False

    def shutdown(self) -> None:
        self.worker = None


def _enter_world_of_one() -> None:
    """Give this process a rank, unless it has one (a launcher's, or another local group's)."""
    if "RANK" not in os.environ:
        place = WorkerPlace(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=free_port())
        os.environ.update(place.environment())


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]
