"""Compare what a stage did to the batch with the columns that it declares.

With HYBRIDRL_CHECK_STAGES=1 every trainer wraps its stages in `check_columns`, in the driver; the tests do so. Checked
are tensor columns: those that a stage requires, adds, replaces or removes, and dtype and shape of those in the
trainer's table. Not checked: values, changes in place, object arrays, and stages that middleware adds.
"""

import functools
from collections.abc import Generator, Mapping
from types import GeneratorType
from typing import Any

import torch

from hybridrl.framework.stage import StageFn, StageSpec, spec_of
from hybridrl.trainer.run.middleware import Column

HINT = "correct the stage, or its reads and writes in the trainer's list of stages"


Tensors = Mapping[str, torch.Tensor]


def check_columns(fn: StageFn, *, table: Mapping[str, Column]) -> StageFn:
    """Return `fn`, which then raises TypeError if it does anything else to the batch than it declares."""
    spec = spec_of(fn)

    @functools.wraps(fn)
    def checked(ctx: Any) -> Any:
        before = _tensors(ctx)
        if before is not None:
            _require(spec.reads, before, spec, "requires")
        result = fn(ctx)
        if isinstance(result, GeneratorType):  # which has not begun
            return checked_halves(result, ctx) if spec.submits else result
        check(before, ctx)
        return result

    def checked_halves(halves: GeneratorType, ctx: Any) -> Generator[Any, None, None]:
        before = _tensors(ctx)
        for submitted in halves:
            yield submitted
            before = _tensors(ctx)  # other stages have run
        check(before, ctx)

    def check(before: Tensors | None, ctx: Any) -> None:
        after = _tensors(ctx)
        if after is not None:
            check_change(spec, before or {}, after, table=table)

    return checked


def check_change(spec: StageSpec, before: Tensors, after: Tensors, *, table: Mapping[str, Column]) -> None:
    """Raise TypeError unless a stage with this spec may change columns `before` into `after`."""
    _require(spec.writes, after, spec, "declares to write")
    written = {name for name, column in after.items() if before.get(name) is not column}
    if undeclared := sorted(written - {*spec.writes}):
        raise TypeError(f"stage {spec.name!r} wrote the columns {undeclared}, and declares {[*spec.writes]}; {HINT}")
    if removed := sorted(before.keys() - after.keys() - {*spec.reads, *spec.writes}):
        raise TypeError(f"stage {spec.name!r} removed the columns {removed}, which it does not read; {HINT}")
    _check_types(spec, {name: after[name] for name in after if name in table}, table)


def _require(names: tuple[str, ...], columns: Tensors, spec: StageSpec, verb: str) -> None:
    if missing := [name for name in names if name not in columns]:
        raise TypeError(f"stage {spec.name!r} {verb} the columns {missing}; the batch has {sorted(columns)}; {HINT}")


def _check_types(spec: StageSpec, columns: Tensors, table: Mapping[str, Column]) -> None:
    sizes: dict[str, int] = {}
    for name, column in columns.items():
        expected, dtype = table[name], str(column.dtype).removeprefix("torch.")
        letters = expected.shape.split()
        if dtype != expected.dtype:
            raise TypeError(f"stage {spec.name!r}: column {name!r} is {dtype}, expected {expected.dtype}; {HINT}")
        sizes = dict(zip(letters, column.shape, strict=False)) | sizes
        if tuple(column.shape) != tuple(sizes[letter] for letter in letters if letter in sizes):
            raise TypeError(
                f"stage {spec.name!r}: column {name!r} has the shape {tuple(column.shape)}, expected "
                f"({expected.shape}) with {sizes}; {HINT}"
            )


def _tensors(ctx: Any) -> dict[str, torch.Tensor] | None:
    """Return the batch's tensor columns, None without a batch.

    There is none near the end of a run with a lag.
    """
    return None if ctx.batch is None else dict(() if ctx.batch.batch is None else ctx.batch.batch.items())
