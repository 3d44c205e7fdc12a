"""`RoleGroup`: calls on the processes of a role, from any process of a submitted job.

    rollout = RoleGroup("rollout")
    outputs = rollout.call_batch("generate", len(prompts), prompts, params)     # a FutureSequence
    rollout.call("load_weights", version).result()                              # a list, one entry per process
    rollout[0].call("metrics").result()                                         # one process

A method is given by name, as the stub function that `rpc` was given, or as the marked method itself. Processes are
looked up at the first call; a call waits for a role that is being started or restarted.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast, overload

from hybridrl.data_plane.chunking import even_bounds
from hybridrl.errors import ConfigError
from hybridrl.master.jobs.job_context import current_context
from hybridrl.sdk.future_sequence import FutureSequence, ended
from hybridrl.sdk.role_calls import RoleCall, known_role, refuse_event_loop, start_call
from hybridrl.sdk.rpc_endpoints import endpoint_name, namespaced
from hybridrl.sdk.runtime import role_name
from hybridrl.single_controller.dispatch import Dispatch, get_dispatch_mode, sequence_mode
from hybridrl.single_controller.invocation import Invocation, endpoints_of

T = TypeVar("T")
Method = str | Callable[..., Any]


class RoleActor:
    """One process of a role."""

    def __init__(self, role: str, rank: int, *, timeout_s: float | None = None) -> None:
        self.role, self.rank, self._timeout_s = role, rank, timeout_s

    @property
    def name(self) -> str:
        """`role-rank`, as in `current_worker().actor_info.name`."""
        return f"{self.role}-{self.rank}"

    def call(self, method: Method, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start a method; return the future of its output. Raises RuntimeError on an event loop."""
        return self._call(endpoint_name(method), args, kwargs)

    def _call(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], record: Invocation | None = None
    ) -> "Future[Any]":
        arguments = Dispatch.ONE_TO_ALL, args, kwargs
        call = _prepare(self.role, name, arguments, [self.rank], timeout_s=self._timeout_s, record=record)
        return start_call(call, lambda outputs: outputs[0])

    def __repr__(self) -> str:
        return f"<{self.name}>"


class RoleGroup(Sequence[RoleActor]):
    """The processes of a role, by rank.

    Args:
        role: A role of the job, in any case, or a member of `RLRoleType`.
        optional: The job may lack the role. Its group is then empty, and calls do nothing: `call` gives [],
            `call_rank0` None, and `call_batch` None for each element.
        timeout_s: Deadline of each call in seconds. Default: that of the endpoint (`rpc(timeout_s=...)`).

    Raises:
        ConfigError: The job has no such role, or this process belongs to no job.
    """

    def __init__(self, role: str, optional: bool = False, *, timeout_s: float | None = None) -> None:
        self.role, self._timeout_s = role_name(role), timeout_s
        sizes = current_context().role_sizes
        if self.role not in sizes and not optional:
            raise ConfigError(
                f"RoleGroup({role!r}): the job has no such role; it has {', '.join(sizes)}. For a role that may be "
                "absent write RoleGroup(..., optional=True)"
            )
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"RoleGroup({role!r}, timeout_s={timeout_s!r}): must be more than 0 seconds")
        self._actors = [RoleActor(self.role, rank, timeout_s=timeout_s) for rank in range(sizes.get(self.role, 0))]

    def __len__(self) -> int:
        return len(self._actors)

    @overload
    def __getitem__(self, index: int) -> RoleActor: ...
    @overload
    def __getitem__(self, index: slice) -> list[RoleActor]: ...
    def __getitem__(self, index: int | slice) -> RoleActor | list[RoleActor]:
        return self._actors[index]

    def call(self, method: Method, *args: Any, _scatter: bool = False, **kwargs: Any) -> "Future[list[Any]]":
        """Start a method on every process; return the future of the outputs, by rank.

        Args:
            method: A name, a stub, or a marked method.
            _scatter: Every argument is a list with one entry per process. Otherwise every process gets all arguments.

        Raises:
            ValueError: `_scatter` with an argument of another length.
            RuntimeError: Called on an event loop.
        """
        mode = Dispatch.ALL_TO_ALL if _scatter else Dispatch.ONE_TO_ALL
        call = self._prepare(method, mode, args, kwargs)
        return ended([]) if call is None else start_call(call, list)

    def call_rank0(self, method: Method, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start a method on rank 0; return the future of its output."""
        if self._actors:
            return self._actors[0].call(method, *args, **kwargs)
        refuse_event_loop(self.role, endpoint_name(method))
        return ended(None)

    def call_batch(self, method: Method, size: int, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Split a batch over the processes, start the method on all of them, and return the outputs as one sequence.

        Every list or tuple is cut into consecutive parts whose lengths differ by at most one. Everything else, also
        text and tensors, goes to every process. The method returns one output for each of its inputs.

        Args:
            size: Number of elements of the batch.

        Raises:
            ValueError: A list or tuple has another length.
            RuntimeError: Called on an event loop.
        """
        if size < 0:
            raise ValueError(f"{self.role}.{endpoint_name(method)}(): size={size} must be 0 or more")
        whole = self._prepare(method, sequence_mode(size), args, kwargs)
        if whole is None:
            return FutureSequence.of([None] * size)
        parts = [start_call(replace(whole, ranks=[rank], references={}), lambda o: o[0]) for rank in whole.ranks]
        return FutureSequence(parts, [stop - start for start, stop in even_bounds(size, len(self))])

    def _prepare(self, method: Method, mode: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RoleCall | None:
        """Return a call of all processes that is not sent yet; None if the job lacks the role."""
        name, ranks = endpoint_name(method), range(len(self))
        refuse_event_loop(self.role, name)
        return _prepare(self.role, name, (mode, args, kwargs), ranks, timeout_s=self._timeout_s) if ranks else None

    def __repr__(self) -> str:
        return f"<RoleGroup {self.role}: {len(self)} processes>"


def create_rpc_proxy(owner: RoleActor | str, namespace: str | None, cls: type[T]) -> T:
    """Return an object whose methods call an object that another process exported with `export_rpc_instance`.

    Methods of the proxy wait for their output; `async def` ones are awaited.

    Args:
        owner: The process, as `RoleGroup(role)[rank]` or by its name, `role-rank`.
        namespace: As given to `export_rpc_instance`.
        cls: Class of the object; its `rpc` methods become the proxy's.
    """
    actor = owner if isinstance(owner, RoleActor) else _actor_of(owner)
    methods = {  # exported after the start of the process, whose threads are those of its entry
        attribute: _proxy_method(actor, namespaced(namespace, name), replace(record, concurrency=1), attribute, cls)
        for name, (attribute, record) in endpoints_of(cls).items()
    }
    if not methods:
        raise ConfigError(f"create_rpc_proxy: {cls.__name__} has no method with @rpc()")
    return cast(T, type(f"{cls.__name__}Proxy", (), {name: staticmethod(call) for name, call in methods.items()})())


def _proxy_method(actor: RoleActor, name: str, record: Invocation, attribute: str, cls: type) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return actor._call(name, args, kwargs, record).result()

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(await asyncio.to_thread(actor._call, name, args, kwargs, record))

    return call_async if iscoroutinefunction(getattr(cls, attribute)) else call


def _actor_of(name: str) -> RoleActor:
    role, _, rank = name.rpartition("/")[2].rpartition("-")
    if not (role and rank.isdecimal()):
        raise ConfigError(f"create_rpc_proxy({name!r}): a process is named role-rank, such as 'rollout-0'")
    return RoleGroup(role)[int(rank)]


def _prepare(
    role: str,
    name: str,
    arguments: tuple[Any, tuple[Any, ...], Mapping[str, Any]],
    ranks: Sequence[int],
    *,
    timeout_s: float | None,
    record: Invocation | None = None,
) -> RoleCall:
    """Return a call that is not sent yet.

    Args:
        arguments: Dispatch mode, args, kwargs.
        record: How it is called; default as its endpoint says. One that was exported after the start has the defaults
            of `rpc`.
    """
    refuse_event_loop(role, name)
    known, (mode, args, kwargs) = known_role(role), arguments
    invocation = record or known.endpoints.get(name) or Invocation(Dispatch.ONE_TO_ALL)
    invocation = invocation if timeout_s is None else replace(invocation, timeout_s=timeout_s)
    known.group.check_callable(name, invocation)
    args, kwargs = tuple(map(_as_list, args)), {key: _as_list(value) for key, value in kwargs.items()}
    own = known.group.per_worker(*get_dispatch_mode(mode).dispatch_fn(known.group, *args, **kwargs))
    return RoleCall(role, name, known, invocation, ranks, own)


def _as_list(argument: Any) -> Any:
    """Return a FutureSequence as a list, which waits for it, and anything else unchanged."""
    return argument.wait() if isinstance(argument, FutureSequence) else argument
