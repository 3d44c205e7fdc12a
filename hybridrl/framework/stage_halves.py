"""One stage and its two halves: what stands before its `yield` runs now, what stands behind it when its turn comes
back.

Everything a failure passes on its way out is done here: it gets the address of the stage, and generators that will not
be resumed are closed. In what order stages run is not decided here.
"""

import contextlib
import functools
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from hybridrl.framework.stage import StageFn, StageSpec, spec_of

RETURNED = object()  # what `next` gives for a generator that came to its end


@dataclass(eq=False, slots=True)
class Half:
    """A second half that waits."""

    spec: StageSpec
    generator: Generator
    ctx: Any

    def run(self) -> None:
        """Run it to its end."""
        try:
            if next(self.generator, RETURNED) is not RETURNED:
                self.generator.close()
                raise RuntimeError("a stage may yield once; what stands behind its second yield would never run")
        except BaseException as error:
            add_address(error, self.spec, self.ctx)
            raise


Pending = list[Half]  # in the order in which the first halves ran


def run_first_half(fn: StageFn, ctx: Any) -> Half | None:
    """Run `fn` up to its `yield` and return what waits behind it; None where there is no `yield`, or it was not
    reached.
    """
    spec = spec_of(fn)
    try:
        result = fn(ctx)
        if not isinstance(result, GeneratorType) or next(result, RETURNED) is RETURNED:
            return None
    except BaseException as error:
        add_address(error, spec, ctx)
        raise
    return Half(spec, result, ctx)


def add_address(error: BaseException, spec: StageSpec, ctx: Any) -> None:
    """Note where an exception comes from."""
    error.add_note(f"in stage {spec.name!r} of step {ctx.total_step}")


def close(pending: Pending, because: BaseException) -> None:
    """End the generators that will not be resumed, so that their `finally` blocks run."""
    while pending:
        half = pending.pop()
        try:
            half.generator.close()
        except Exception as failure:
            because.add_note(f"closing stage {half.spec.name!r} failed too: {failure!r}")


@contextlib.contextmanager
def closing(pending: Pending) -> Iterator[Pending]:
    """If the block fails, close what waits."""
    try:
        yield pending
    except BaseException as error:
        close(pending, error)
        raise


def run_second_halves(pending: Pending) -> Pending:
    """Run what waits, last stage first, and return the list, which is empty then.

    If one fails the others are closed.
    """
    with closing(pending):
        while pending:
            pending.pop().run()
    return pending


def named_after(kind: str, fns: Iterable[StageFn]) -> StageSpec:
    """Return the spec of several stages that are used as one."""
    return StageSpec(f"{kind}<{','.join(spec_of(fn).name for fn in fns)}>")


def locked(fn: StageFn, lock: Any) -> StageFn:
    """Return `fn`, each half of which runs while it holds `lock`."""

    @functools.wraps(fn)
    def alone(ctx: Any) -> Any:
        with lock:
            result = fn(ctx)
        return _locked_halves(result, lock) if isinstance(result, GeneratorType) else result

    return alone


def _locked_halves(halves: Generator, lock: threading.Lock) -> Generator[None, None, None]:
    with contextlib.closing(halves):
        while True:
            with lock:
                if next(halves, RETURNED) is RETURNED:
                    return
            yield
