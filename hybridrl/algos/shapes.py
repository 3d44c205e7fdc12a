"""Shape check at the start of every formula that combines tensors element by element.

No formula here intends broadcasting: (B, 1) with (B, T) would give a plausible, wrong number.
"""

import torch

from hybridrl.errors import DataError


def check_same_shape(**tensors: torch.Tensor) -> None:
    """Check that all tensors have the same shape.

    Raises:
        DataError: Shapes differ; the message has each tensor's name and shape.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise DataError(f"these tensors must have the same shape: {shapes}")
