"""One remote call on a group of workers, as a record. Read this module first; it is the idea of the layer.

    class Scorer(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, timeout_s=600)
        def score(self, data: DataProto) -> DataProto: ...

    scorers = RayWorkerGroup(pool, RayClassWithInitArgs(Scorer), role="scorer")
    scores = scorers.score(data)          # rows cut up, sent, computed, joined

A call is always the same few answers: who runs it (`execute`), how arguments are split and answers merged (`dispatch`),
whether the caller waits (`blocking`) and how long (`timeout_s`), whether it may be repeated (`idempotent`), and how
many of it run at once (`concurrency`). `register` writes them as an `Invocation` on the worker's method; a group reads
the record when it binds the method under the same name. Nothing here runs anything, and nothing here knows Ray.

Read next: `dispatch.py` (the modes), `worker_group.py` (the call in four lines), `ray_worker_group.py` (the processes),
`worker_host.py` (the other end).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)
MAGIC_ATTR = "__hybridrl_invocation__"
# One step of a large model may take most of an hour; past this, silence is a fault and not work.
DEFAULT_TIMEOUT_S = 3600.0
# Calls of an `async def` method wait for something else most of the time; each holds one idle thread of its worker.
ASYNC_CONCURRENCY = 64


class Dispatch:
    """Names of the dispatch modes. `register_dispatch_mode` adds to them, and then `Dispatch.NAME` is the new name."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    DIRECT_ROLLOUT_METHOD = "DIRECT_ROLLOUT_METHOD"


class Execute:
    """Names of the execute modes: every worker of the group, or the first one only."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class Invocation:
    """How one method is called on a group.

    dispatch: name of a mode, or `{"dispatch_fn": ..., "collect_fn": ...}` (see `dispatch.DispatchMode`). execute:
    `Execute.ALL` or `Execute.RANK_ZERO`. blocking: wait for the answers, or return references (a `DataProtoFuture` in
    the DP modes). timeout_s: deadline of the call in seconds; None waits for ever and is for services only. idempotent:
    the call may be repeated after a fault without changing the result. concurrency: how many calls of the method one
    worker runs at once, beside everything else it does. 1: calls take turns with the worker's other methods, in the
    order in which they were made. materialize_futures: a `DataProtoFuture` among the arguments is fetched before the
    method runs; else the method gets the future.
    """

    dispatch: str | Mapping[str, Callable] = Dispatch.ALL_TO_ALL
    execute: str = Execute.ALL
    blocking: bool = True
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    idempotent: bool = False
    concurrency: int = 1
    materialize_futures: bool = True


def register(
    dispatch_mode: str | Mapping[str, Callable] = Dispatch.ALL_TO_ALL,
    execute_mode: str = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    idempotent: bool = False,
    concurrency: int | None = None,
) -> Callable[[F], F]:
    """Mark a worker's method, plain or `async def`, as callable on its group. The method itself is returned unchanged.

    concurrency: None means 1, and `ASYNC_CONCURRENCY` for an `async def`. Raises ValueError for an execute mode that is
    not one of `Execute` and for a concurrency below 1; an unknown dispatch mode is refused when a group binds the
    method, because modes may be registered later than the class is written.
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
        )
        setattr(method, MAGIC_ATTR, record)
        return method

    return mark


def invocations_of(worker_cls: type) -> dict[str, Invocation]:
    """Return the registered methods of a worker class, by name, inherited ones included.

    An override that is not marked again keeps the mark of the method it overrides, so that a subclass need not repeat
    it.
    """
    found: dict[str, Invocation] = {}
    for base in reversed(worker_cls.__mro__):
        for name, member in vars(base).items():
            record: Any = getattr(member, MAGIC_ATTR, None)
            if record is not None:
                found[name] = record
    return found
