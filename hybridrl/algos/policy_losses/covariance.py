"""Policy losses that act on the few tokens with the largest covariance of log-prob and advantage, arXiv:2505.22617.

These tokens lower the policy's entropy most. Which ones they are depends on the whole batch, and a worker sees
micro-batches of one rank. So the driver selects once per step (`select_by_rank`, `select_at_random`), from the
log-probs before the update, and the losses read the selection. The result depends neither on micro-batches and ranks
nor on the order of rows. Shape letters and results as in `policy_loss.py`.
"""

import numpy as np
import torch

from hybridrl.algos.policy_losses.clipped import clipped_surrogate
from hybridrl.algos.policy_losses.policy_loss import (
    PolicyLoss,
    limited_log_ratio,
    nowhere,
    on_mask,
    register_policy_loss,
)


@register_policy_loss("clip_cov")
def clip_cov(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    cov_selected_BT: torch.Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate without the selected tokens, arXiv:2505.22617, Clip-Cov.

        L = 0 where selected, else max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))        r = exp(logp - old)

    `select_at_random` selects. Selected tokens stay in the normaliser and count as clipped. The log ratio is limited to
    +-20. There is no dual clip: `clip_c` is unused. Without a selection nothing is selected.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    losses_BT, clipped_BT = clipped_surrogate(log_ratio_BT.exp(), advantages_BT, clip_low=clip_low, clip_high=clip_high)
    selected_BT = nowhere(clipped_BT) if cov_selected_BT is None else cov_selected_BT.bool()
    losses_BT = torch.where(selected_BT, 0, losses_BT)
    return on_mask(losses_BT, clipped_BT | selected_BT, nowhere(clipped_BT), log_ratio_BT, response_mask_BT)


@register_policy_loss("kl_cov")
def kl_cov(
    log_probs_BT: torch.Tensor,
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    ppo_kl_coef: float = 0.1,
    cov_selected_BT: torch.Tensor | None = None,
) -> PolicyLoss:
    """Policy gradient with a penalty on the selected tokens, arXiv:2505.22617, KL-Cov.

        L = -A r + (ppo_kl_coef |log r| where selected)        r = exp(logp - old), log r limited to +-20

    `select_by_rank` selects. |log r| stands for the paper's KL(old || new) of a token, as in its authors' code. There
    is no clip: the clip ranges are unused. Without a selection nothing is selected.
    """
    log_ratio_BT = limited_log_ratio(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    losses_BT = -advantages_BT * log_ratio_BT.exp()
    if cov_selected_BT is not None:
        losses_BT = torch.where(cov_selected_BT.bool(), losses_BT + ppo_kl_coef * log_ratio_BT.abs(), losses_BT)
    nowhere_BT = nowhere(log_ratio_BT)
    return on_mask(losses_BT, nowhere_BT, nowhere_BT, log_ratio_BT, response_mask_BT)


def covariances(old_log_probs_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return (logp - mean logp)(A - mean A) (B, T) float64, 0 off the mask; arXiv:2505.22617 equation 10.

    The means are over all tokens on the mask. logp are the log-probs before the update, where the paper's first
    optimizer step has them too; verl takes the present ones of each micro-batch.
    """
    on_BT = mask_BT.bool()
    centred = [
        values_BT.double() - _order_free_mean(values_BT[on_BT]) for values_BT in (old_log_probs_BT, advantages_BT)
    ]
    return torch.where(on_BT, centred[0] * centred[1], torch.zeros_like(centred[0]))


def _order_free_mean(values_N: torch.Tensor) -> torch.Tensor:
    """Return the mean in float64, the same to the last bit whatever the order of the values.

    Sums of integers have no rounding: values are multiples of a unit so small that their sum just fits in 61 bits.
    """
    values_N = values_N.double()
    limit = len(values_N) * float(values_N.abs().max()) if len(values_N) else 0.0
    if not limit:
        return values_N.new_zeros(())
    unit = limit / 2.0**61
    return (values_N / unit).round().long().sum().double() * unit / len(values_N)


def select_by_rank(
    old_log_probs_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor, *, ratio: float
) -> torch.Tensor:
    """Return which tokens on the mask have the largest covariance, (B, T) bool.

    Of N tokens on the mask, k = max(1, floor(ratio N)) are selected.

    All tokens that are equal to the k-th are selected, so that order decides nothing. A covariance that is not above 0
    is never selected: it does not lower the entropy. verl takes the k largest of a micro-batch whatever their sign.
    """
    cov_BT = covariances(old_log_probs_BT, advantages_BT, mask_BT)
    positive_N = cov_BT[cov_BT > 0]
    count = min(_num_selected(mask_BT, ratio), len(positive_N))
    if not count:
        return torch.zeros_like(mask_BT, dtype=torch.bool)
    return cov_BT >= positive_N.topk(count).values[-1]


def select_at_random(
    old_log_probs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    ratio: float,
    low: float,
    high: float,
    keys_BT: torch.Tensor,
) -> torch.Tensor:
    """Return k = max(1, floor(ratio N)) tokens with low < covariance < high, (B, T) bool.

    There may be fewer such tokens.

    Those with the smallest keys, of which `token_keys` makes random ones. verl draws from torch's global generator, so
    that its choice depends on what else was drawn, and on the cut into micro-batches.
    """
    cov_BT = covariances(old_log_probs_BT, advantages_BT, mask_BT)
    candidates_BT = mask_BT.bool() & (cov_BT > low) & (cov_BT < high)
    keys_N = keys_BT[candidates_BT]
    count = min(_num_selected(mask_BT, ratio), len(keys_N))
    if not count:
        return candidates_BT & False
    return candidates_BT & (keys_BT <= keys_N.kthvalue(count).values)


def _num_selected(mask_BT: torch.Tensor, ratio: float) -> int:
    return max(1, int(ratio * int(mask_BT.bool().sum())))


def token_keys(
    input_ids_BL: torch.Tensor, attention_mask_BL: torch.Tensor, *, num_columns: int, seed: int
) -> torch.Tensor:
    """Return a pseudo-random key (B, num_columns) int64 per response token.

    It is a hash of the token's row, its column and the seed.

    A row is identified by its tokens (prompt and response) and their order, so padding, the order of rows and their
    distribution over ranks change nothing. Equal rows get equal keys.
    """
    on_BL = attention_mask_BL.bool().numpy()
    tokens_BL = input_ids_BL.numpy().astype(np.uint64)
    positions_BL = np.cumsum(on_BL, axis=1).astype(np.uint64)
    mixed_BL = np.where(on_BL, _mix(_mix(tokens_BL) ^ positions_BL), np.uint64(0))
    rows_B1 = mixed_BL.sum(axis=1, dtype=np.uint64, keepdims=True)
    columns_1T = _mix(np.arange(num_columns, dtype=np.uint64)[None] ^ _mix(np.array([[seed]], dtype=np.uint64)))
    return torch.from_numpy((_mix(rows_B1 ^ columns_1T) >> np.uint64(1)).astype(np.int64))


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the finaliser of splitmix64 (Steele, Lea, Flood 2014) of uint64 values: all bits depend on all bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
