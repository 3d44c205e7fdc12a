"""Stage declarations: name, role, columns read and written, purity.

A trainer declares it with the decorator `stage`; the task, the stage graph and the master read it with `spec_of`.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

StageFn = Callable[[Any], Any]  # takes the context; a generator function has a second half after its one `yield`


@dataclass(frozen=True)
class StageSpec:
    """The declaration of a stage, on which the runtime relies."""

    name: str
    role: str | None = None  # role whose workers do the work; None is the driver
    reads: tuple[str, ...] = ()  # required columns of the batch
    writes: tuple[str, ...] = ()  # columns of the batch that it adds or replaces
    pure: bool = False  # running it again has the same effect


def stage(
    name: str | None = None,
    *,
    role: str | None = None,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    pure: bool = True,
) -> Callable[[StageFn], StageFn]:
    """Return a decorator that attaches a `StageSpec` to a stage.

    A stage is a function or method of one context. `name` defaults to the function's own.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"stage() takes a name, not {name!r}; write @stage() with parentheses")

    def decorate(fn: StageFn) -> StageFn:
        spec = StageSpec(name or fn.__name__, role, tuple(reads), tuple(writes), pure)
        try:
            fn.stage_spec = spec  # type: ignore[attr-defined]
        except AttributeError:  # a bound method has no attributes of its own
            return with_spec(fn, spec)
        return fn

    return decorate


def declared_spec(fn: StageFn) -> StageSpec | None:
    """Return the spec that `stage` attached, or None.

    It is looked up on `fn`, on its method and on `__call__` of its class.
    """
    return getattr(fn, "stage_spec", None) or getattr(type(fn).__call__, "stage_spec", None)


def spec_of(fn: StageFn) -> StageSpec:
    """Return the spec of `fn`.

    An undecorated function gets its own name and counts as not pure, because its effects are unknown.
    """
    while isinstance(fn, functools.partial) and declared_spec(fn) is None:
        fn = fn.func
    return declared_spec(fn) or StageSpec(getattr(fn, "__name__", type(fn).__name__))


def with_spec(fn: StageFn, spec: StageSpec) -> StageFn:
    """Return a callable that calls `fn` and carries `spec`; `fn` itself is unchanged."""
    if spec_of(fn) == spec:
        return fn

    @functools.wraps(fn, updated=())
    def stage_call(ctx: Any) -> Any:
        return fn(ctx)

    stage_call.stage_spec = spec  # type: ignore[attr-defined]
    return stage_call
