"""The critic's loss, and the explained variance of the returns.

Shape letters: B rows, T response tokens.
"""

import torch

from hybridrl.algos.masked import masked_var
from hybridrl.algos.row_wise import row_wise
from hybridrl.algos.shapes import check_same_shape


@row_wise
def clipped_value_loss(
    values_BT: torch.Tensor, old_values_BT: torch.Tensor, returns_BT: torch.Tensor, *, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses_BT, clipped_BT) of PPO's clipped value loss.

        L = 1/2 max((V - G)^2, (clip(V, V_old - cliprange, V_old + cliprange) - G)^2)

    From OpenAI baselines' ppo2; compared in arXiv:2006.05990. `clipped_BT` bool: the clipped term is larger, so the
    token has no gradient. Not masked and not averaged: padding has losses too, which `aggregate.agg_loss` excludes.
    """
    check_same_shape(values=values_BT, old_values=old_values_BT, returns=returns_BT)
    limited_BT = torch.clamp(values_BT, old_values_BT - cliprange, old_values_BT + cliprange)
    plain_BT, clipped_BT = (values_BT - returns_BT) ** 2, (limited_BT - returns_BT) ** 2
    return 0.5 * torch.maximum(plain_BT, clipped_BT), (clipped_BT > plain_BT).detach()


def explained_variance(values_BT: torch.Tensor, returns_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return 1 - var(G - V) / var(G) over the tokens on the mask, a scalar without gradient.

    1 is a perfect critic, 0 is as good as the mean, and a negative value is worse. It is 0 if the returns have no
    variance.
    """
    check_same_shape(values=values_BT, returns=returns_BT, mask=mask_BT)
    with torch.no_grad():
        variance = masked_var(returns_BT, mask_BT)
        explained = 1 - masked_var(returns_BT - values_BT, mask_BT) / variance
        return torch.where(variance > 0, explained, torch.zeros_like(explained))
