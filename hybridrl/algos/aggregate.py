"""Aggregate token losses to one number.

Shape letters: B rows, T response tokens. Divisors are the counts of the whole mini-batch, over all ranks and
micro-batches. So the losses of the micro-batches sum to that of the mini-batch, and so do their gradients: neither
depends on the split into micro-batches. Ranks must therefore sum gradients, not average them.
"""

from collections.abc import Callable

import torch

from hybridrl.algos.masked import masked_mean, masked_sum
from hybridrl.registry import Registry

Count = float | torch.Tensor


def loss_counts(mask_BT: torch.Tensor) -> tuple[int, int]:
    """Return (tokens on the mask, rows with at least one).

    Summed over all ranks they are the divisors of `agg_loss`.
    """
    mask_BT = mask_BT.bool()
    return int(mask_BT.sum()), int(mask_BT.any(dim=1).sum())


def agg_loss(
    losses_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: str,
    *,
    num_tokens: Count,
    num_seqs: Count,
    max_len: int | None = None,
) -> torch.Tensor:
    """Return this micro-batch's part of the mini-batch's loss, a scalar with the gradient of `losses_BT`.

        token-mean               sum_it L_it / num_tokens                   DAPO, arXiv:2503.14476
        token-sum                sum_it L_it
        seq-mean-token-sum       sum_it L_it / num_seqs
        seq-mean-token-mean      sum_i (mean_t L_it) / num_seqs             GRPO, arXiv:2402.03300
        seq-mean-token-sum-norm  sum_it L_it / (num_seqs max_len)           Dr. GRPO, arXiv:2503.20783

    With a count of 0 the loss is 0.

    Args:
        num_tokens, num_seqs: Counts of the whole mini-batch, see `loss_counts`. A row without a token is not a
            sequence.
        max_len: None is T, which is the same everywhere only if no micro-batch is trimmed.

    Raises:
        ConfigError: The mode is unknown.
        DataError: Shapes differ.
    """
    reduce = AGGREGATIONS.lookup(mode)
    return reduce(losses_BT, mask_BT, _at_least_one(num_tokens), _at_least_one(num_seqs), max_len or losses_BT.shape[1])


def _at_least_one(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


AGGREGATIONS: Registry[Callable[..., torch.Tensor]] = Registry(
    "actor_rollout_ref.actor.loss_agg_mode", kind="aggregation mode", import_paths=False
)
AGGREGATIONS.update(
    {
        "token-mean": lambda losses_BT, mask_BT, tokens, seqs, length: masked_sum(losses_BT, mask_BT) / tokens,
        "token-sum": lambda losses_BT, mask_BT, tokens, seqs, length: masked_sum(losses_BT, mask_BT),
        "seq-mean-token-sum": lambda losses_BT, mask_BT, tokens, seqs, length: masked_sum(losses_BT, mask_BT) / seqs,
        "seq-mean-token-mean": lambda losses_BT, mask_BT, tokens, seqs, length: (
            masked_mean(losses_BT, mask_BT, dim=1).sum() / seqs
        ),
        "seq-mean-token-sum-norm": lambda losses_BT, mask_BT, tokens, seqs, length: (
            masked_sum(losses_BT, mask_BT) / (seqs * length)
        ),
    }
)
