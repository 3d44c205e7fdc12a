"""What a stage says about itself: its name, whose work it is, what it reads and writes, whether it may run again."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

StageFn = Callable[[Any], Any]  # takes the context; a generator function has a second half after its one `yield`


@dataclass(frozen=True)
class StageSpec:
    """Facts about a stage that the runtime may rely on."""

    name: str
    role: str | None = None  # who does the work; None is the driver itself
    reads: tuple[str, ...] = ()  # columns of the batch that must be there
    writes: tuple[str, ...] = ()  # columns of the batch that are there afterwards
    pure: bool = False  # may be run again with the same effect


def stage(
    name: str | None = None,
    *,
    role: str | None = None,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    pure: bool = True,
) -> Callable[[StageFn], StageFn]:
    """Decorate a function or method of one context with a `StageSpec`; `name` defaults to the function's own."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"stage() takes a name, not {name!r}: write @stage() with parentheses")

    def decorate(fn: StageFn) -> StageFn:
        spec = StageSpec(name or fn.__name__, role, tuple(reads), tuple(writes), pure)
        try:
            fn.stage_spec = spec  # type: ignore[attr-defined]
        except AttributeError:  # a bound method holds no attributes
            return with_spec(fn, spec)
        return fn

    return decorate


def declared_spec(fn: StageFn) -> StageSpec | None:
    """Return the spec that `stage` attached to `fn`, to its method or to its class's `__call__`; None where there is
    none.
    """
    return getattr(fn, "stage_spec", None) or getattr(type(fn).__call__, "stage_spec", None)


def spec_of(fn: StageFn) -> StageSpec:
    """Return the spec of `fn`.

    One that was never decorated gets its name and is taken as not pure: nothing is known of it.
    """
    while isinstance(fn, functools.partial) and declared_spec(fn) is None:
        fn = fn.func
    return declared_spec(fn) or StageSpec(getattr(fn, "__name__", type(fn).__name__))


def with_spec(fn: StageFn, spec: StageSpec) -> StageFn:
    """Return a callable that does what `fn` does and is known by `spec`; `fn` itself is not changed."""
    if spec_of(fn) == spec:
        return fn

    @functools.wraps(fn, updated=())
    def stage_call(ctx: Any) -> Any:
        return fn(ctx)

    stage_call.stage_spec = spec  # type: ignore[attr-defined]
    return stage_call
