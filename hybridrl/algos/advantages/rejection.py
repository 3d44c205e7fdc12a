"""Rejection sampling: keep some responses and fine-tune on them, as an estimator of advantages.

With the policy loss `gpg`, L = -A logp, an advantage of 1 on the tokens of kept rows and 0 elsewhere is supervised
fine-tuning on the kept rows. Arguments and results as in `groups.py`; rows of length 0 are never kept.
"""

import torch

from hybridrl.algos.advantages.estimator import register_adv_est


@register_adv_est("raft", needs_group=True, per_response=True)
def raft(scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor) -> torch.Tensor:
    """Keep the best response to each prompt: RAFT, arXiv:2304.06767.

        A_i = c if R_i = max_g, else 0        c = tokens of the batch / tokens of the kept rows

    Rows that share the best score are all kept. So is the best of a group without any good response: use `star` if
    scores say right or wrong. c makes the mean over all tokens the mean over the kept ones, so that the gradient is
    that of supervised fine-tuning on the kept rows if the batch is one optimizer step.
    """
    counted_B = lengths_B > 0
    ids_G, index_B = torch.unique(group_B, return_inverse=True)
    worst_G = torch.full((len(ids_G),), -torch.inf, dtype=scores_B.dtype, device=scores_B.device)
    best_G = worst_G.scatter_reduce(0, index_B, torch.where(counted_B, scores_B, -torch.inf), "amax")
    return mean_over_kept(counted_B & (scores_B == best_G[index_B]), lengths_B)


@register_adv_est("star", per_response=True)
def star(scores_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Keep every response with a score above 0: STaR, arXiv:2203.14465; RFT, arXiv:2308.01825.

        A_i = c if R_i > 0, else 0        c as in `raft`

    Equal responses are not merged, which RFT does, and no prompt gets a hint, which STaR gives where all fail.
    """
    return mean_over_kept(scores_B > 0, lengths_B)


def mean_over_kept(kept_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return weights (B,) float64 that make a mean over all tokens one over kept ones.

    Rows that are not kept have weight 0.

    The mean of the weights over all tokens is 1, or 0 if no token is kept.
    """
    return kept_B * (lengths_B.sum().double() / (lengths_B * kept_B).sum().clamp(min=1))
