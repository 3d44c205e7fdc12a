"""Compare what a repeated stage has computed with what the run has kept. Pure functions of columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hybridrl.data_plane.columns import deep_equal


def compare_columns(found: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Return a line that counts the bit-equal columns, if there are any, and one for each other column."""
    differences = {name: column_difference(found.get(name), kept[name]) for name in kept}
    lines = [f"{name}: {difference}" for name, difference in differences.items() if difference]
    num_equal = len(differences) - len(lines)
    return [f"bit-equal ({num_equal} column{'s' if num_equal > 1 else ''})"] * (num_equal > 0) + lines


def column_difference(found: Any, kept: Any) -> str:
    """Return how two columns differ; empty if they have the same bits.

    NaNs are equal to each other.
    """
    if found is None:
        return "the repeated stage did not write it"
    if isinstance(kept, np.ndarray):
        rows = sum(not deep_equal(one, other) for one, other in zip(found, kept, strict=False))
        rows += abs(len(found) - len(kept))
        return f"{rows} of {len(kept)} rows differ" if rows else ""
    if found.is_nested or kept.is_nested:
        found, kept = (torch.cat([row.flatten() for row in one.unbind()]) for one in (found, kept))
    if (found.shape, found.dtype) != (kept.shape, kept.dtype):
        return f"{tuple(found.shape)} {found.dtype} instead of {tuple(kept.shape)} {kept.dtype}"
    same = (found == kept) | (found.isnan() & kept.isnan() if kept.is_floating_point() else False)
    if bool(same.all()):
        return ""
    place = _place(~same)
    if not kept.is_floating_point():
        return f"{int((~same).sum())} of {kept.numel()} values differ, first {place}"
    deviation = (found.double() - kept.double()).abs()
    if bool((deviation.isnan() & ~same).any()):
        return f"NaN in one of the two, first {_place(deviation.isnan() & ~same)}"
    at = deviation.masked_fill(same, 0.0)
    return f"largest deviation {at.max().item():.2g} {_place(at == at.max())}"


def nan_lines(columns: Mapping[str, Any]) -> list[str]:
    """Return a line for each column with a NaN."""
    tensors = {name: one for name, one in columns.items() if isinstance(one, torch.Tensor) and not one.is_nested}
    wrong = {name: one.isnan() for name, one in tensors.items() if one.is_floating_point()}
    return [
        f"{name}: {int(one.sum())} of {one.numel()} values are NaN, first {_place(one)}"
        for name, one in wrong.items()
        if bool(one.any())
    ]


def compare_metrics(found: Mapping[str, float], kept: Mapping[str, float]) -> list[str]:
    """Return a line that counts the equal metrics, and one for each other.

    NaNs are equal to each other. Times are left out.
    """
    names = [
        name for name in kept if name in found and not (name.startswith(("timing", "perf/")) or name.endswith("time_s"))
    ]
    differing = [name for name in names if not deep_equal(found[name], kept[name])]
    lines = [f"{name}: {found[name]:.9g} instead of {kept[name]:.9g}" for name in differing]
    return [f"equal ({len(names) - len(lines)} metrics)", *lines]


def _place(mask: torch.Tensor) -> str:
    index = mask.nonzero()[0].tolist()
    return ", ".join(f"{what} {number}" for what, number in zip(("at row", "token", "place"), index, strict=False))
