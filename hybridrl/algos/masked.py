"""Sums, means, variances and whitening over the tokens on a mask.

Shape letters: B rows, T response tokens. A mask is bool, integer or float, non-zero on counted tokens. Values off the
mask are never read: NaN or infinity there changes nothing, and no gradient flows there. An empty mask gives 0, never
NaN.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hybridrl.algos.shapes import check_same_shape

WHITEN_EPS = 1e-8
"""Added to the variance before the root, as in verl: values that are all equal become 0, not NaN."""
CPU_PART_ELEMENTS = 2**17
"""Values of one part of `row_parts` on a CPU: 0.5 MiB of float32.

Its intermediate results stay in the cache.
"""


def row_parts(like_BT: torch.Tensor) -> Iterator[slice]:
    """Yield slices of consecutive rows, so that a formula of several passes reads main memory once.

    On other devices than a CPU the one slice has all rows.
    """
    num_rows, size = like_BT.shape[0], max(1, like_BT[:1].numel())
    rows = max(1, CPU_PART_ELEMENTS // size) if like_BT.device.type == "cpu" else max(1, num_rows)
    return (slice(start, start + rows) for start in range(0, num_rows, rows))


def masked_sum(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, dim: int | None = None) -> torch.Tensor:
    """Return the sum of the values on the mask, 0 where it is empty.

    Over everything, or along `dim`.
    """
    check_same_shape(values=values_BT, mask=mask_BT)
    if values_BT.ndim == 2 and values_BT.is_floating_point() and dim in (None, 1):
        sums_B: torch.Tensor = _RowSums.apply(values_BT, mask_BT)
        return sums_B.sum() if dim is None else sums_B
    if values_BT.ndim == 2 and values_BT.dtype == torch.bool and dim in (None, 1):
        counts_B = row_counts(mask_BT, flags_BT=values_BT)
        return counts_B.sum() if dim is None else counts_B
    kept_BT = torch.where(mask_BT.bool(), values_BT, 0)
    return kept_BT.sum() if dim is None else kept_BT.sum(dim)


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, dim: int | None = None) -> torch.Tensor:
    """Return the mean of the values on the mask, 0 where it is empty.

    Over everything, or along `dim`.
    """
    if mask_BT.ndim == 2 and dim in (None, 1):
        count = row_counts(mask_BT)
        count = count.sum() if dim is None else count
    else:
        count = torch.count_nonzero(mask_BT, dim=dim)
    return masked_sum(values_BT, mask_BT, dim=dim) / count.clamp(min=1)


def row_counts(mask_BT: torch.Tensor, *, flags_BT: torch.Tensor | None = None) -> torch.Tensor:
    """Return the number of each row's entries on the mask, (B,) int64.

    Args:
        flags_BT: bool. If given, only entries with a flag are counted.
    """
    counts_B = torch.zeros(len(mask_BT), dtype=torch.int64, device=mask_BT.device)
    for part in row_parts(mask_BT):
        kept = mask_BT[part].bool() if flags_BT is None else mask_BT[part].bool() & flags_BT[part]
        counts_B[part] = torch.count_nonzero(kept, dim=1)  # 10 times as fast as a sum of bools
    return counts_B


class _RowSums(torch.autograd.Function):
    """Sums of the values on the mask of each row, (B,).

    Both directions read main memory once, and nothing of the size of the batch is kept for the backward pass but the
    mask.
    """

    @staticmethod
    def forward(ctx: Any, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask_BT)
        sums_B = values_BT.new_zeros(len(values_BT))
        for part in row_parts(values_BT):
            sums_B[part] = torch.where(mask_BT[part].bool(), values_BT[part], 0).sum(1)
        return sums_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_B: torch.Tensor) -> tuple[torch.Tensor, None]:
        [mask_BT] = ctx.saved_tensors
        gradient_BT = gradient_B.new_empty(mask_BT.shape)
        for part in row_parts(gradient_BT):
            gradient_BT[part] = torch.where(mask_BT[part].bool(), gradient_B[part, None], 0)
        return gradient_BT, None


def masked_var(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance sum (x - mean)^2 / (n - 1) of the n values on the mask.

    0 for fewer than two values.
    """
    mask_BT = mask_BT.bool()
    squares_BT = (values_BT - masked_mean(values_BT, mask_BT)) ** 2
    return masked_sum(squares_BT, mask_BT) / (torch.count_nonzero(mask_BT) - 1).clamp(min=1)


def masked_whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) on the mask and 0 off it.

    Mean and unbiased variance are those of all values on the mask, over all rows. A single value is only shifted. They
    are summed in float64: the float32 mean of equal values differs from them, and the division by about 1e-4 makes
    advantages of that difference. Equal float32 values become exactly 0, unlike in verl.

    Args:
        shift_mean: False adds the mean back.
    """
    check_same_shape(values=values_BT, mask=mask_BT)
    mask_BT = mask_BT.bool()
    count = torch.count_nonzero(mask_BT)
    mean = _sum64(values_BT, mask_BT) / count.clamp(min=1)
    var = _sum64(values_BT, mask_BT, around=mean.to(values_BT.dtype)) / (count - 1).clamp(min=1)
    scale, mean = torch.rsqrt(var + WHITEN_EPS).to(values_BT.dtype), mean.to(values_BT.dtype)
    whitened_BT = torch.empty_like(values_BT)
    for part in row_parts(values_BT):
        whitened = (values_BT[part] - mean) * scale
        whitened_BT[part] = torch.where(mask_BT[part], whitened if shift_mean else whitened + mean, 0)
    return whitened_BT


def _sum64(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, around: torch.Tensor | None = None) -> torch.Tensor:
    """Return the float64 sum over the mask of the values, or of their squared distance to `around`."""
    total = torch.zeros((), dtype=torch.float64, device=values_BT.device)
    for part in row_parts(values_BT):
        terms = values_BT[part] if around is None else (values_BT[part] - around) ** 2
        total = total + torch.where(mask_BT[part], terms, 0).sum(dtype=torch.float64)
    return total
