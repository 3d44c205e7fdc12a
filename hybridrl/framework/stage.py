"""Stage declarations: name, role, columns read and written, purity, submission.

A trainer declares its step as a list of `Stage`, and a single function with the decorator `stage`. The task, the stage
graph and the master read the declaration with `spec_of`.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Self

StageFn = Callable[[Any], Any]  # takes the context; a generator function has a second half after its one `yield`
Wrapper = Callable[[StageFn], StageFn]
DeviceSlots = Mapping[str, Collection]  # role -> its device slots; a role without any takes no turns


class VoidMiddleware:
    """A stage without work: `Task.use` leaves it out, and a call does nothing."""

    def __call__(self, ctx: Any) -> None:
        pass


@dataclass(frozen=True)
class StageSpec:
    """The declaration of a stage, on which the runtime relies."""

    name: str
    role: str | None = None  # role whose workers do the work; None is the driver
    reads: tuple[str, ...] = ()  # required columns of the batch
    writes: tuple[str, ...] = ()  # columns of the batch that it adds or replaces
    pure: bool = False  # running it again has the same effect
    submits: bool = False  # its first half starts work elsewhere, its second half takes the result (see `overlap.py`)


@dataclass(frozen=True)
class Stage:
    """One line of a step: a method of a trainer, and what it declares. Data only: `bind` makes it callable.

    Attributes:
        method: Function of trainer and context.
        name: Default: the method's own.
        role: Role whose workers do the work; None is the driver.
        reads: Required columns of the batch.
        writes: Columns of the batch that it adds or replaces.
        pure: Whether running it again has the same effect. One that is not pure runs once per step.
        submits: Whether `method` is a generator function that starts work elsewhere, and yields before it needs it.
        enabled: Whether the step has this stage.
    """

    method: Callable[[Any, Any], Any]
    name: str = ""
    role: str | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    pure: bool = True
    submits: bool = False
    enabled: bool = True

    def when(self, condition: Any) -> Self:
        """Return this stage, enabled only if `condition` is true."""
        return replace(self, enabled=bool(condition))

    @property
    def spec(self) -> StageSpec:
        """The declaration, without repeated columns."""
        reads, writes = (tuple(dict.fromkeys(columns)) for columns in (self.reads, self.writes))
        return StageSpec(self.name or self.method.__name__, self.role, reads, writes, self.pure, self.submits)

    def bind(self, trainer: Any) -> StageFn:
        """Return the stage as a function of the context, with its spec."""
        return with_spec(MethodType(self.method, trainer), self.spec)


def stage(
    name: str | None = None,
    *,
    role: str | None = None,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    pure: bool = True,
    submits: bool = False,
) -> Callable[[StageFn], StageFn]:
    """Return a decorator that attaches a `StageSpec` to a stage.

    A stage is a function or method of one context. `name` defaults to the function's own.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"stage() takes a name, not {name!r}; write @stage() with parentheses")

    def decorate(fn: StageFn) -> StageFn:
        spec = StageSpec(name or fn.__name__, role, tuple(reads), tuple(writes), pure, submits)
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
