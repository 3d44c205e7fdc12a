"""Statistics of tokens from logits whose vocabulary is sharded over tensor-parallel processes.

They are those of `algos/token_stats`. No process ever holds a full row.

Shapes: N tokens, v columns of this process, V = v * peers columns in all, of which the first `vocab_size` are tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hybridrl.algos.token_stats.from_states import TokenStats

IMPOSSIBLE = -1e30
"""Logit of a padding column. Its probability is exactly 0; -inf would make p log p NaN."""


def sharded_token_stats(
    logits_Nv: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    with_sum_pi_squared: bool = False,
) -> TokenStats:
    """Return the statistics of softmax(logits / temperature), float32, equal on all peers. Collective.

    Log-probs and entropy are differentiable. With z = logits / temperature:

        log_probs_n = z_{n, label_n} - logsumexp_v z_nv        entropy_n = -sum_v p_nv log p_nv
        sum_pi_squared_n = sum_v p_nv^2, if asked for

    Each peer's backward gives the gradient of its own columns, so all peers must compute the same loss.

    Args:
        labels_N: int64 in [0, vocab_size).
    """
    return TokenStats(*_ShardedLogProbs.apply(logits_Nv, labels_N, temperature, vocab_size, group, with_sum_pi_squared))


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
        with_sum_pi_squared: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
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
        # the norm squares without a copy of the logits
        squares = [torch.linalg.vector_norm(exp_Nv, dim=-1) ** 2] if with_sum_pi_squared else []
        sums = torch.stack([exp_Nv.sum(-1), (exp_Nv * z_Nv).sum(-1), label_N, *squares])
        dist.all_reduce(sums, group=group)
        total_N, weighted_N, label_N = sums[:3]
        squares_N = sums[3] / total_N**2 if with_sum_pi_squared else None
        if squares_N is not None:
            ctx.mark_non_differentiable(squares_N)
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(exp_Nv.div_(total_N[:, None]), index_N, mine_N, entropy_N)
        ctx.temperature, ctx.dtype = temperature, logits_Nv.dtype
        return label_N - log_total_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_N: torch.Tensor, h_N: torch.Tensor, _squares: Any
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        p_Nv, index_N, mine_N, entropy_N = ctx.saved_tensors
        gradient = p_Nv * -(g_N + h_N * entropy_N)[:, None]
        if h_N.any():
            gradient -= torch.xlogy(p_Nv, p_Nv) * h_N[:, None]
        gradient.scatter_add_(-1, index_N[:, None], (g_N * mine_N)[:, None])
        return (gradient / ctx.temperature).to(ctx.dtype), None, None, None, None, None
