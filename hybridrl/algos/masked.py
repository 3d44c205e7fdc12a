"""Sums, means, variances and whitening over the tokens on a mask.

Shape letters: B rows, T response tokens. A mask is bool, integer or float, non-zero on counted tokens. Values off the
mask are never read: NaN or infinity there changes nothing, and no gradient flows there. An empty mask gives 0, never
NaN.
"""

import torch

from hybridrl.algos.shapes import check_same_shape

WHITEN_EPS = 1e-8
"""Added to the variance before the root, as in verl: values that are all equal become 0, not NaN."""


def masked_sum(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, dim: int | None = None) -> torch.Tensor:
    """Return the sum of the values on the mask, 0 where it is empty.

    Over everything, or along `dim`.
    """
    check_same_shape(values=values_BT, mask=mask_BT)
    kept_BT = torch.where(mask_BT.bool(), values_BT, torch.zeros_like(values_BT))
    return kept_BT.sum() if dim is None else kept_BT.sum(dim)


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, dim: int | None = None) -> torch.Tensor:
    """Return the mean of the values on the mask, 0 where it is empty.

    Over everything, or along `dim`.
    """
    mask_BT = mask_BT.bool()
    count = mask_BT.sum() if dim is None else mask_BT.sum(dim)
    return masked_sum(values_BT, mask_BT, dim=dim) / count.clamp(min=1)


def masked_var(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance sum (x - mean)^2 / (n - 1) of the n values on the mask.

    0 for fewer than two values.
    """
    mask_BT = mask_BT.bool()
    squares_BT = (values_BT - masked_mean(values_BT, mask_BT)) ** 2
    return masked_sum(squares_BT, mask_BT) / (mask_BT.sum() - 1).clamp(min=1)


def masked_whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) on the mask and 0 off it.

    Mean and unbiased variance are those of all values on the mask, over all rows. A single value is only shifted.

    Args:
        shift_mean: False adds the mean back.
    """
    mean, var = masked_mean(values_BT, mask_BT), masked_var(values_BT, mask_BT)
    whitened_BT = (values_BT - mean) * torch.rsqrt(var + WHITEN_EPS)
    if not shift_mean:
        whitened_BT = whitened_BT + mean
    return torch.where(mask_BT.bool(), whitened_BT, torch.zeros_like(whitened_BT))
