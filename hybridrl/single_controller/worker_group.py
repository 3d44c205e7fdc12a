"""`WorkerGroup`: many workers called as one object.

A group binds every registered method of its worker class. Calling `group.method(...)` is four steps, in `_bind`: split
the arguments (dispatch), start the method on the workers (submit), wait for the first failure or all answers (fetch),
merge (collect); `group.method.later(...)` is the same without waiting, whatever the method's mark says. Where workers
live is a subclass's business: `RayWorkerGroup` has processes, `LocalWorkerGroup` one worker in the calling process.
"""

import functools
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from hybridrl.single_controller.dispatch import get_dispatch_mode
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S, Execute, Invocation, invocations_of
from hybridrl.single_controller.references import References
from hybridrl.single_controller.worker import Worker

W = TypeVar("W")


class ClassWithInitArgs(Generic[W]):
    """A worker class and the arguments it will be made with, elsewhere and later."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any):
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)


class WorkerGroup(ABC, Generic[W]):
    """The caller's side of a group of `world_size` workers of class W that play one role."""

    def __init__(self, worker_cls: type[W], *, role: str, world_size: int):
        self.worker_cls, self.role, self.world_size = worker_cls, role, world_size
        self.is_new = True  # not so where the workers were taken up from an earlier driver, and know their models
        self._dp_layouts: dict[str, tuple[list[int], list[bool]]] = {}
        self.invocations = invocations_of(worker_cls)
        for name, invocation in self.invocations.items():
            setattr(self, name, self._bind(name, invocation))

    def mark_ready(self) -> None:
        """Tell the workers that they have all that they are called with, so that a next driver may go on with them as
        they are.
        """

    def set_deadline(self, timeout_s: float) -> None:
        """Let calls take so many seconds, except those whose method was registered with a `timeout_s` of its own."""
        for name, invocation in self.invocations.items():
            if invocation.timeout_s == DEFAULT_TIMEOUT_S:
                self.invocations[name] = replace(invocation, timeout_s=timeout_s)
                setattr(self, name, self._bind(name, self.invocations[name]))

    @property
    def calls(self) -> W:
        """This group, typed as its workers: `group.calls.score(batch)` is `group.score(batch)`, and a type checker and
        an editor know it.

        They see the worker's own signature. That is the group's in the modes that take and return a batch, and with
        `Execute.RANK_ZERO`; a mode that collects a list returns a list of what they see.
        """
        return cast(W, self)

    def _bind(self, name: str, invocation: Invocation) -> Callable:
        mode = get_dispatch_mode(invocation.dispatch)

        def run(args: tuple, kwargs: dict, *, wait: bool) -> Any:
            if invocation.execute == Execute.RANK_ZERO:
                answer = self._submit(name, [0], [args], [kwargs])
                return self.fetch(answer, method=name, timeout_s=invocation.timeout_s)[0] if wait else answer
            args, kwargs = mode.dispatch_fn(self, *args, **kwargs)
            answers = self._submit(name, range(self.world_size), *self._per_worker(args, kwargs), sized=not wait)
            return mode.collect_fn(
                self, self.fetch(answers, method=name, timeout_s=invocation.timeout_s) if wait else answers
            )

        @functools.wraps(getattr(self.worker_cls, name))
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(args, kwargs, wait=invocation.blocking)

        call.later = lambda *args, **kwargs: run(args, kwargs, wait=False)  # type: ignore[attr-defined]
        return call

    def _per_worker(self, args: Sequence[Sequence], kwargs: Mapping[str, Sequence]) -> tuple[list[tuple], list[dict]]:
        """Turn lists with one entry per worker, one for each argument, into arguments, one set for each worker."""
        ranks = range(self.world_size)
        return [tuple(a[rank] for a in args) for rank in ranks], [
            {k: v[rank] for k, v in kwargs.items()} for rank in ranks
        ]

    def dp_layout(self, mesh_name: str) -> tuple[list[int], list[bool]]:
        """Return, per worker, its data-parallel rank on a mesh and whether its answer is collected; asked once, then
        remembered.

        Raises ValueError when ranks are missing on the mesh, or when not exactly one worker of each answers: rows would
        be lost or doubled.
        """
        if mesh_name not in self._dp_layouts:
            places = self.execute_all(Worker.query_mesh_place.__name__, mesh_name)
            answering = sorted(rank for rank, keep in places if keep)
            if answering != list(range(max(rank for rank, _ in places) + 1)):
                raise ValueError(
                    f"mesh {mesh_name!r} of {self.role}: exactly one worker of each data-parallel rank "
                    "must be collected, "
                    f"but the workers announced (dp_rank, is_collect) = {places}"
                )
            self._dp_layouts[mesh_name] = ([rank for rank, _ in places], [keep for _, keep in places])
        return self._dp_layouts[mesh_name]

    # -- calls by name: for methods that are not registered, and for one worker

    def execute_rank_async(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method on one worker; return a reference to its answer, for `fetch`."""
        return self._submit(method, [rank], [args], [kwargs])[0]

    def execute_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on one worker and return its answer."""
        return self.fetch(self._submit(method, [rank], [args], [kwargs]), method=method)[0]

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_async(0, method, *args, **kwargs)

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank(0, method, *args, **kwargs)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> References:
        """Start a method on every worker with the same arguments, each put once; return a reference to each answer.

        Unlike verl's, it never guesses that a list is meant to be spread: that is what `Dispatch.ALL_TO_ALL` says.
        """
        shared = [[self.put(a)] * self.world_size for a in args]
        shared_kwargs = {k: [self.put(v)] * self.world_size for k, v in kwargs.items()}
        return self._submit(method, range(self.world_size), *self._per_worker(shared, shared_kwargs))

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list:
        """Run a method on every worker with the same arguments; return the answers in worker order."""
        return self.fetch(self.execute_all_async(method, *args, **kwargs), method=method)

    execute_rank_zero_sync = execute_rank_zero
    execute_all_sync = execute_all

    # -- where workers live

    @abstractmethod
    def _submit(
        self, method: str, ranks: Sequence[int], args: Sequence[tuple], kwargs: Sequence[dict], *, sized: bool = False
    ) -> References:
        """Start a method on the workers `ranks`, with their arguments; return what stands for the answers, in the order
        of `ranks`.

        sized: the number of rows of every answer will be asked for before the answer itself.
        """

    @abstractmethod
    def fetch(self, references: list, *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list:
        """Return the answers behind the references, in their order; the first failure is raised at once, whoever still
        runs.
        """

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Return what stands for a value that several workers get: one copy, shared."""

    @abstractmethod
    def put_each(self, values: Sequence) -> list:
        """Return what stands for values of which each goes to another worker."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the group's workers, whatever they are doing."""


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]
