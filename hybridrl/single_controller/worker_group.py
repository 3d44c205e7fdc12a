"""`WorkerGroup`: the caller's side of many workers that are called as one object.

A group binds every registered method of its worker class. `group.method(...)` takes four steps, in `bind`: split the
arguments (dispatch), start the method on the workers (submit), wait for the first failure or all outputs (fetch), and
merge them (collect). `group.method.submit(...)` does not wait, whether or not the method is registered as blocking.
The record's `pre` runs before the first step, and `post` after the last.

Subclasses provide the workers: `RayWorkerGroup` in processes, `LocalWorkerGroup` one in the calling process.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

from hybridrl.single_controller.dispatch import get_dispatch_mode
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S, Execute, Invocation, endpoints_of
from hybridrl.single_controller.references import OutputRefs
from hybridrl.single_controller.worker import Worker

W = TypeVar("W")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a method: positional ones, and others by name


class ClassWithInitArgs(Generic[W]):
    """A worker class and its constructor's arguments; calling it constructs the worker."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)


class RayClassWithInitArgs(ClassWithInitArgs[W]):
    """A worker class with its constructor's arguments; a class made by `ray.remote` is unwrapped."""

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        super().__init__(metadata.modified_class if metadata is not None else cls, *args, **kwargs)
        self.additional_resources: dict[str, float] = {}
        self.options: dict[str, Any] = {}

    def set_additional_resource(self, resources: dict[str, float]) -> None:
        """Request further resources for each worker, for instance `{"accelerator_type:H100": 0.001}`."""
        self.additional_resources.update(resources)

    def update_options(self, options: dict[str, Any]) -> None:
        """Change the Ray actor options of each worker, for instance `{"runtime_env": {"nsight": "default"}}`."""
        self.options.update(options)

    def recipes(self, role: str) -> dict[str, ClassWithInitArgs[Any]]:
        """Return the recipe of each worker that a process constructs, by role."""
        return {role: ClassWithInitArgs(self.cls, *self.args, **self.kwargs)}

    @property
    def actor_options(self) -> dict[str, Any]:
        """All options of each worker's Ray actor."""
        resources = {**self.options.get("resources", {}), **self.additional_resources}
        return self.options | ({"resources": resources} if resources else {})


class WorkerGroup(ABC, Generic[W]):
    """A group of `world_size` workers of class W in one role."""

    def __init__(self, worker_cls: type[W], *, role: str, world_size: int) -> None:
        self.worker_cls, self.role, self.world_size = worker_cls, role, world_size
        self._call_timeout_s = DEFAULT_TIMEOUT_S
        self.is_new = True  # False after reattaching to the workers of a previous driver, which have their models
        self._dp_layouts: dict[str, tuple[list[int], list[bool]]] = {}
        endpoints = endpoints_of(worker_cls)
        self.attributes = {name: attribute for name, (attribute, _) in endpoints.items()}
        self.invocations = {name: invocation for name, (_, invocation) in endpoints.items()}
        for name, invocation in self.invocations.items():
            setattr(self, name, self.bind(name, invocation))

    def mark_ready(self) -> None:
        """Mark the workers as fully initialized, so that a restarted driver may reattach to them."""

    def set_call_timeout(self, timeout_s: float) -> None:
        """Set the deadline in seconds of all calls without a `timeout_s` of their own, registered or not."""
        self._call_timeout_s = timeout_s

    def deadline_s(self, timeout_s: float | None) -> float | None:
        """Return the deadline of a call: that of the group if the call has none of its own."""
        return self._call_timeout_s if timeout_s == DEFAULT_TIMEOUT_S else timeout_s

    @property
    def calls(self) -> W:
        """This group, typed as its worker class: `group.calls.score(batch)` is `group.score(batch)`.

        Type checkers and editors use the worker's own signature. It is right for modes that take and return a batch,
        and for `Execute.RANK_ZERO`. A mode that collects a list returns a list of the annotated type.
        """
        return cast(W, self)

    def bind(self, name: str, invocation: Invocation) -> Callable[..., Any]:
        """Return a function that calls a method or endpoint of every worker as the record says.

        The worker class need not have the method: it may be unmarked, or an endpoint that the process exported.

        Returns:
            The function; its `submit` makes the same call without waiting.

        Raises:
            ValueError: unknown dispatch mode.
            ConfigError: the call needs a concurrency group that the processes do not have.
        """
        get_dispatch_mode(invocation.dispatch)
        self.check_callable(name, invocation)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, invocation, args, kwargs, wait=invocation.blocking)

        def submit(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, invocation, args, kwargs, wait=False)

        method = getattr(self.worker_cls, self.attributes.get(name, name), None)
        call = call if method is None else functools.wraps(method)(call)
        call.submit = submit  # type: ignore[attr-defined]
        return call

    def _call(
        self, name: str, invocation: Invocation, args: tuple[Any, ...], kwargs: dict[str, Any], *, wait: bool
    ) -> Any:
        """Call a method of the workers in the four steps of the module's description."""
        if invocation.pre is not None:
            args, kwargs = invocation.pre(*args, **kwargs)
        if invocation.execute == Execute.RANK_ZERO:
            outputs: Any = self.start_calls(name, [0], [(args, kwargs)], invocation=invocation)
            result = self.fetch(outputs, method=name, timeout_s=invocation.timeout_s)[0] if wait else outputs
        else:
            mode = get_dispatch_mode(invocation.dispatch)
            arguments = self.per_worker(*mode.dispatch_fn(self, *args, **kwargs))
            ranks = range(self.world_size)
            outputs = self.start_calls(name, ranks, arguments, invocation=invocation, with_num_rows=not wait)
            outputs = self.fetch(outputs, method=name, timeout_s=invocation.timeout_s) if wait else outputs
            result = mode.collect_fn(self, outputs)
        return result if invocation.post is None else invocation.post(result)

    def check_callable(self, name: str, invocation: Invocation) -> None:
        """Raise ConfigError if the workers cannot run calls with this record."""

    def per_worker(self, args: Sequence[Sequence[Any]], kwargs: Mapping[str, Sequence[Any]]) -> list[Arguments]:
        """Transpose: one sequence over workers per argument -> the arguments of each worker."""
        return [
            (tuple(argument[rank] for argument in args), {name: argument[rank] for name, argument in kwargs.items()})
            for rank in range(self.world_size)
        ]

    def dp_layout(self, mesh_name: str) -> tuple[list[int], list[bool]]:
        """Return, per worker, its data-parallel rank on a mesh and whether its output is collected; cached.

        Raises:
            ValueError: not exactly one worker of each data-parallel rank is collected, so that rows would be lost or
                duplicated.
        """
        if mesh_name not in self._dp_layouts:
            positions = self.execute_all(Worker.query_mesh_place.__name__, mesh_name)
            collected = sorted(rank for rank, is_collect in positions if is_collect)
            if collected != list(range(max(rank for rank, _ in positions) + 1)):
                raise ValueError(
                    f"mesh {mesh_name!r} of {self.role}: exactly one worker of each data-parallel rank must be "
                    f"collected, but the workers announced (dp_rank, is_collect) = {positions}"
                )
            self._dp_layouts[mesh_name] = ([rank for rank, _ in positions], [is_collect for _, is_collect in positions])
        return self._dp_layouts[mesh_name]

    # -- calls by name: for methods that are not registered, and for one worker

    def execute_ranks_async(self, ranks: Sequence[int], method: str, *args: Any, **kwargs: Any) -> OutputRefs:
        """Start a method on these workers with the same arguments; return a reference to each output."""
        return self.start_calls(method, ranks, [(args, kwargs)] * len(ranks))

    def execute_ranks(self, ranks: Sequence[int], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method on these workers with the same arguments; return the outputs in the order of `ranks`."""
        return self.fetch(self.execute_ranks_async(ranks, method, *args, **kwargs), method=method)

    def execute_rank_async(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method on one worker; return a reference to its output, for `fetch`."""
        return self.start_calls(method, [rank], [(args, kwargs)])[0]

    def execute_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on one worker and return its output."""
        return self.fetch(self.start_calls(method, [rank], [(args, kwargs)]), method=method)[0]

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_async(0, method, *args, **kwargs)

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank(0, method, *args, **kwargs)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> OutputRefs:
        """Start a method on every worker with the same arguments; return a reference to each output.

        Each argument is put once. Unlike in verl, a list is never split over workers; use `Dispatch.ALL_TO_ALL`.
        """
        shared = tuple(map(self.put, args)), {name: self.put(value) for name, value in kwargs.items()}
        return self.start_calls(method, range(self.world_size), [shared] * self.world_size)

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method on every worker with the same arguments; return the outputs in worker order."""
        return self.fetch(self.execute_all_async(method, *args, **kwargs), method=method)

    execute_rank_zero_sync = execute_rank_zero
    execute_all_sync = execute_all

    # -- what subclasses provide

    @abstractmethod
    def start_calls(
        self,
        method: str,
        ranks: Sequence[int],
        arguments: Sequence[Arguments],
        *,
        invocation: Invocation | None = None,
        with_num_rows: bool = False,
    ) -> OutputRefs:
        """Start a method on the workers `ranks`; return references to the outputs, in that order.

        Args:
            arguments: of each of these workers.
            invocation: default the record with which the method is registered, if it is.
            with_num_rows: also return a reference to the number of rows of every output.
        """

    @abstractmethod
    def fetch(
        self, references: list[Any], *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Return the outputs behind the references, in their order; raise the first failure at once.

        Args:
            timeout_s: Deadline. The default is that of the group (`set_call_timeout`).
        """

    @abstractmethod
    def as_futures(self, references: Sequence[Any]) -> "list[Future[Any]]":
        """Return a future of each output; it ends with the output or with an error that `fetch` explains."""

    def is_lost(self, reference: Any) -> bool:
        """Return whether the worker that computes an output is known to be lost."""
        return False

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Return an argument that shares one copy of the value among several workers."""

    @abstractmethod
    def put_each(self, values: Sequence[Any]) -> list[Any]:
        """Return arguments for values of which each goes to another worker."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the group's workers, also in the middle of a call."""
