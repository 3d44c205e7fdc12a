"""`Invocation`: how one method is called on a group of workers, as a record.

Read this module first.

    class Scorer(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, timeout_s=600)
        def score(self, data: DataProto) -> DataProto: ...

    scorers = RayWorkerGroup(pool, RayClassWithInitArgs(Scorer), role="scorer")
    scores = scorers.score(data)          # rows split, sent, computed, concatenated

A record says which workers run the method (`execute`), how arguments are split and outputs merged (`dispatch`), whether
the caller waits (`blocking`) and how long (`timeout_s`), whether the call may be repeated (`idempotent`), and how many
run at once (`concurrency`). `pre` and `post` are functions of the caller: they change the arguments and the result.
`register` stores the record on the worker's method; a group reads it when it binds the method. A method that callers
reach by a name is an endpoint; its name is the method's unless the record has another. This module runs nothing and
does not use Ray.

Read next: `dispatch.py` (the modes), `worker_group.py` (the four steps of a call), `ray_worker_group.py` (the
processes), `processes/worker_host.py` (the receiving end).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from hybridrl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
MAGIC_ATTR = "__hybridrl_invocation__"
# One step of a large model may take most of an hour; a call without a result after this long is a fault.
DEFAULT_TIMEOUT_S = 3600.0
# Calls of an `async def` method mostly wait; each occupies one idle thread of its worker.
ASYNC_CONCURRENCY = 64
# Ray's concurrency groups of a worker process. Each has threads of its own; all other calls share one thread.
CONCURRENT = "concurrent"  # for methods with `concurrency` > 1
USER_CODE = "user_code"  # for `run()` of user code, so that the process can be called meanwhile
CONTROL = "control"  # for questions to a process whose thread is busy


class Dispatch:
    """Names of the dispatch modes; `register_dispatch_mode` adds attributes, and `remove` takes them away again."""

    forget: ClassVar[dict[str, Callable[[], object]]] = {}  # of added modes: drops their functions

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    DIRECT_ROLLOUT_METHOD = "DIRECT_ROLLOUT_METHOD"
    AUTO_SHARD = "AUTO_SHARD"

    @classmethod
    def remove(cls, name: str) -> None:
        """Remove a mode that `register_dispatch_mode` added. Methods registered with it can no longer be called.

        Raises:
            ValueError: The name is built in or unknown.
        """
        if name not in cls.forget:
            raise ValueError(f"dispatch mode {name!r} was not added by register_dispatch_mode and cannot be removed")
        cls.forget.pop(name)()
        delattr(cls, name)


class Execute:
    """Names of the execute modes: every worker of the group, or only rank 0."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class Invocation:
    """How one method is called on a group.

    Attributes:
        dispatch: name of a mode, or `{"dispatch_fn": ..., "collect_fn": ...}` (see `dispatch.DispatchMode`).
        execute: `Execute.ALL` or `Execute.RANK_ZERO`.
        blocking: wait for the outputs, or return references (a `DataProtoFuture` in the DP modes).
        timeout_s: deadline of the call in seconds. None waits without limit and is for services only.
        idempotent: the call may be repeated after a fault without changing the result.
        concurrency: calls of the method that one worker runs at once, concurrently with its other methods. With 1,
            calls run one at a time with the worker's other methods, in submission order.
        materialize_futures: fetch a `DataProtoFuture` among the arguments before the method runs. Otherwise the method
            gets the future.
        pre: `pre(*args, **kwargs) -> (args, kwargs)`, called in the caller before the arguments are split.
        post: `post(result) -> result`, called in the caller on what the call returns. For a call that does not wait,
            these are the references.
        name: name of the endpoint. None means the method's own.
        concurrency_group: `USER_CODE` or `CONTROL`, if the process was started with it. None means `CONCURRENT` for a
            concurrency above 1, and otherwise the thread of the process's other calls.
    """

    dispatch: str | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL
    execute: str = Execute.ALL
    blocking: bool = True
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    idempotent: bool = False
    concurrency: int = 1
    materialize_futures: bool = True
    pre: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    post: Callable[[Any], Any] | None = None
    name: str | None = None
    concurrency_group: str | None = None

    @property
    def used_concurrency_group(self) -> str | None:
        """The concurrency group that runs the call; None for the thread of all other calls."""
        return self.concurrency_group or (CONCURRENT if self.concurrency > 1 else None)


def register(
    dispatch_mode: str | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: str = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    idempotent: bool = False,
    concurrency: int | None = None,
    pre: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    post: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> Callable[[F], F]:
    """Mark a worker's method, plain or `async def`, as callable on its group; return it unchanged.

    The parameters are the attributes of `Invocation`.

    Args:
        concurrency: None means 1, and `ASYNC_CONCURRENCY` for an `async def`.

    Raises:
        ValueError: unknown execute mode, or a concurrency below 1. An unknown dispatch mode is refused when a group
            binds the method, because a mode may be registered after the class is defined.
    """
    if execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
        raise ValueError(f"execute_mode={execute_mode!r} is neither Execute.ALL nor Execute.RANK_ZERO")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency={concurrency} must be at least 1")

    def mark(method: F) -> F:
        record = Invocation(
            dispatch_mode,
            execute_mode,
            blocking=blocking,
            timeout_s=timeout_s,
            idempotent=idempotent,
            concurrency=concurrency or (ASYNC_CONCURRENCY if iscoroutinefunction(method) else 1),
            materialize_futures=materialize_futures,
            pre=pre,
            post=post,
            name=name,
        )
        setattr(method, MAGIC_ATTR, record)
        return method

    return mark


def invocations_of(worker_cls: type) -> dict[str, Invocation]:
    """Return the registered methods of a worker class, by name, inherited ones included.

    An override without a mark keeps the mark of the method that it overrides.
    """
    found: dict[str, Invocation] = {}
    for base in reversed(worker_cls.__mro__):
        for name, member in vars(base).items():
            record: Any = getattr(member, MAGIC_ATTR, None)
            if record is not None:
                found[name] = record
    return found


def endpoints_of(target: type | ModuleType) -> dict[str, tuple[str, Invocation]]:
    """Return the endpoints of a worker class, or of a module's own functions.

    Functions that a module imports are endpoints of the module that defines them.

    Returns:
        Name of the endpoint -> name of the attribute and record of the call.

    Raises:
        ConfigError: two attributes have the same endpoint name.
    """
    marked = _marked_functions(target) if isinstance(target, ModuleType) else invocations_of(target)
    found: dict[str, tuple[str, Invocation]] = {}
    for attribute, record in marked.items():
        name = record.name or attribute
        if name in found:
            raise ConfigError(
                f"{target.__name__}: {found[name][0]} and {attribute} are both the endpoint {name!r}; "
                "give one of them another name"
            )
        found[name] = (attribute, record)
    return found


def _marked_functions(module: ModuleType) -> dict[str, Invocation]:
    return {
        name: getattr(member, MAGIC_ATTR)
        for name, member in vars(module).items()
        if hasattr(member, MAGIC_ATTR) and getattr(member, "__module__", None) == module.__name__
    }
