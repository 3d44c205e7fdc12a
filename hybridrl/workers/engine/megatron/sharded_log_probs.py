"""Log-probs and entropy of logits whose vocabulary is sharded over tensor-parallel processes.

No process ever holds a full row.

Shapes: N tokens, v columns of this process, V = v * peers columns in all, of which the first `vocab_size` are tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

IMPOSSIBLE = -1e30
"""Logit of a padding column. Its probability is exactly 0; -inf would make p log p NaN."""


def sharded_log_probs_and_entropy(
    logits_Nv: torch.Tensor, labels_N: torch.Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log_probs_N, entropy_N) of softmax(logits / temperature), equal on all peers. Collective.

    Both are float32 and differentiable. With z = logits / temperature:

        log_probs_n = z_{n, label_n} - logsumexp_v z_nv        entropy_n = -sum_v p_nv log p_nv

    Each peer's backward gives the gradient of its own columns, so all peers must compute the same loss.

    Args:
        labels_N: int64 in [0, vocab_size).
    """
    return _ShardedLogProbs.apply(logits_Nv, labels_N, temperature, vocab_size, group)


class _ShardedLogProbs(torch.autograd.Function):
    """Compute log-probs and entropy, and their gradient.

    With g, h the gradients of log-prob and entropy H, and p = softmax(z):

    dL/dz_v = g (1[v = label] - p_v) - h p_v (log p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: torch.Tensor,
        labels_N: torch.Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = group.rank() * logits_Nv.size(-1)
        z_Nv = logits_Nv.float() / temperature
        z_Nv[:, max(0, vocab_size - first) :] = IMPOSSIBLE
        top_N = z_Nv.max(-1).values
        dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
        z_Nv -= top_N[:, None]
        exp_Nv = z_Nv.exp()
        index_N = labels_N - first
        mine_N = (index_N >= 0) & (index_N < logits_Nv.size(-1))
        index_N = index_N.clamp(0, logits_Nv.size(-1) - 1)
        label_N = z_Nv.gather(-1, index_N[:, None]).squeeze(-1) * mine_N
        sums_3N = torch.stack([exp_Nv.sum(-1), (exp_Nv * z_Nv).sum(-1), label_N])
        dist.all_reduce(sums_3N, group=group)
        total_N, weighted_N, label_N = sums_3N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(exp_Nv.div_(total_N[:, None]), index_N, mine_N, entropy_N)
        ctx.temperature, ctx.dtype = temperature, logits_Nv.dtype
        return label_N - log_total_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_N: torch.Tensor, h_N: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        p_Nv, index_N, mine_N, entropy_N = ctx.saved_tensors
        gradient = p_Nv * -(g_N + h_N * entropy_N)[:, None]
        if h_N.any():
            gradient -= torch.xlogy(p_Nv, p_Nv) * h_N[:, None]
        gradient.scatter_add_(-1, index_N[:, None], (g_N * mine_N)[:, None])
        return (gradient / ctx.temperature).to(ctx.dtype), None, None, None, None
