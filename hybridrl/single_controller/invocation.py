"""One remote call on a group of workers, as a record.

A call is always the same four answers: who runs it (`execute`), how arguments are split and answers merged (`dispatch`),
whether the caller waits (`blocking`), and for how long (`timeout_s`). `register` writes the record on a worker's method; a worker
group reads it when it binds that method. Nothing here runs anything, and nothing here knows Ray.

Read next: `dispatch.py` (the modes), `worker_group.py` (the call), `ray_worker_group.py` (the processes).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)
MAGIC_ATTR = "__hybridrl_invocation__"
# One step of a large model may take most of an hour; past this, silence is a fault and not work.
DEFAULT_TIMEOUT_S = 3600.0


class Dispatch:
    """Names of the dispatch modes. `register_dispatch_mode` adds to them, and then `Dispatch.NAME` is the new name."""

    RANK_ZERO = "RANK_ZERO"
    ONE_TO_ALL = "ONE_TO_ALL"
    ALL_TO_ALL = "ALL_TO_ALL"
    DP_COMPUTE = "DP_COMPUTE"
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"


class Execute:
    """Names of the execute modes: every worker of the group, or the first one only."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class Invocation:
    """How one method is called on a group.

    dispatch: name of a mode, or `{"dispatch_fn": ..., "collect_fn": ...}` (see `dispatch.DispatchMode`).
    execute: `Execute.ALL` or `Execute.RANK_ZERO`.
    blocking: wait for the answers, or return references (a `DataProtoFuture` in the DP modes).
    timeout_s: deadline of the call in seconds; None waits for ever and is for services only.
    idempotent: the call may be repeated after a fault without changing the result.
    """

    dispatch: str | Mapping[str, Callable] = Dispatch.ALL_TO_ALL
    execute: str = Execute.ALL
    blocking: bool = True
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    idempotent: bool = False


def register(
    dispatch_mode: str | Mapping[str, Callable] = Dispatch.ALL_TO_ALL,
    execute_mode: str = Execute.ALL,
    *,
    blocking: bool = True,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    idempotent: bool = False,
) -> Callable[[F], F]:
    """Mark a worker's method as callable on its group. The method itself is returned unchanged.

    Raises ValueError for an execute mode that is not one of `Execute`; an unknown dispatch mode is refused when a group binds the
    method, because modes may be registered later than the class is written.
    """
    if execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
        raise ValueError(f"execute_mode={execute_mode!r} is neither Execute.ALL nor Execute.RANK_ZERO")
    record = Invocation(dispatch_mode, execute_mode, blocking=blocking, timeout_s=timeout_s, idempotent=idempotent)

    def mark(method: F) -> F:
        setattr(method, MAGIC_ATTR, record)
        return method

    return mark


def invocations_of(worker_cls: type) -> dict[str, Invocation]:
    """Return the registered methods of a worker class, by name, inherited ones included.

    An override that is not marked again keeps the mark of the method it overrides, so that a subclass need not repeat it.
    """
    found: dict[str, Invocation] = {}
    for base in reversed(worker_cls.__mro__):
        for name, member in vars(base).items():
            record: Any = getattr(member, MAGIC_ATTR, None)
            if record is not None:
                found[name] = record
    return found
