"""Formulas of tokens that are computed a few rows at a time, with their gradient.

Shape letters: B rows, T response tokens, b rows of one part. A formula of n elementwise steps in full tensors reads and
writes main memory n times, and autograd keeps most intermediate results for the backward pass. In parts that fit into
the cache it reads the inputs twice and writes the results once, and keeps nothing but its inputs.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from hybridrl.algos.masked import row_parts
from hybridrl.algos.shapes import check_same_shape

P = ParamSpec("P")
R = TypeVar("R", bound=tuple[Any, ...])


def row_wise(formula: Callable[P, R]) -> Callable[P, R]:
    """Return the formula, computed in `row_parts` on a CPU: the same numbers in less time and memory.

    It takes columns (B, T) by position and settings by name, and returns a tuple, or NamedTuple, of columns (B, T). The
    first result has a gradient, in the first argument only. A row of the results depends on the same row of the
    arguments alone; a result that is one value in memory is the same for all rows. Batches of one part, and columns
    given by name, go to the formula as they are.

    The backward pass computes each part again, so that nothing is kept between the passes.
    """
    names = [name.removesuffix("_BT") for name in signature(formula).parameters]

    @wraps(formula)
    def in_parts(*columns_BT: Any, **settings: Any) -> Any:
        is_cut = not any(isinstance(value, torch.Tensor) for value in settings.values())
        if not is_cut or len(list(row_parts(columns_BT[0]))) < 2:
            return formula(*columns_BT, **settings)
        check_same_shape(**dict(zip(names, columns_BT, strict=False)))
        kind, *results = _RowWise.apply(lambda *columns: formula(*columns, **settings), *columns_BT)
        return kind(*results) if hasattr(kind, "_fields") else tuple(results)

    return in_parts


def is_one_value(column_BT: torch.Tensor) -> bool:
    """Return whether all entries are one value in memory, as those of `policy_losses.policy_loss.nowhere`."""
    return not any(column_BT.stride())


class _RowWise(torch.autograd.Function):
    """The results of a formula for all rows, and their type before them."""

    @staticmethod
    def forward(ctx: Any, formula: Callable[..., tuple[Any, ...]], *columns_BT: torch.Tensor) -> tuple[Any, ...]:
        ctx.formula = formula
        ctx.save_for_backward(*columns_BT)
        kind: type = tuple
        results: list[torch.Tensor] = []
        for part in row_parts(columns_BT[0]):
            found = formula(*(column_BT[part] for column_BT in columns_BT))
            if not results:
                kind, num_rows = type(found), len(columns_BT[0])
                results = [
                    value[:1].expand(num_rows, -1) if is_one_value(value) else value.new_empty(num_rows, value.shape[1])
                    for value in found
                ]
            for result_BT, value in zip(results, found, strict=True):
                if not is_one_value(result_BT):
                    result_BT[part] = value
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return kind, *results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, kind: None, gradient_BT: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        first_BT, *others_BT = ctx.saved_tensors
        found_BT = torch.empty_like(first_BT)
        for part in row_parts(first_BT):
            with torch.enable_grad():
                leaf = first_BT[part].detach().requires_grad_()
                losses = ctx.formula(leaf, *(column_BT[part] for column_BT in others_BT))[0]
            [found_BT[part]] = torch.autograd.grad(losses, leaf, gradient_BT[part])
        return None, found_BT, *(None for _ in others_BT)
