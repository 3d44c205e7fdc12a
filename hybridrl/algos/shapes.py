"""The one check every formula starts with: the tensors it combines element by element have the same shape.

Broadcasting is never what a formula here means: (B, 1) against (B, T) would give a plausible, wrong number.
"""

import torch

from hybridrl.errors import DataError


def check_same_shape(**tensors: torch.Tensor) -> None:
    """Pass if all tensors have the same shape.

    Errors: DataError naming each tensor with its shape.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise DataError(f"these tensors must have the same shape: {shapes}")
