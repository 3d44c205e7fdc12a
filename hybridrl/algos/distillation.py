"""On-policy distillation: how far the student is from the teacher, token by token, on the student's own samples.

The student samples, the teacher scores. With s and p the student's and the teacher's distribution of the next token:

    reverse KL(s || p) = sum_v s_v log(s_v / p_v)    seeks a mode; MiniLLM, arXiv:2306.08543
    forward KL(p || s) = sum_v p_v log(p_v / s_v)    covers all modes; GKD, arXiv:2306.13649, with its data lambda = 1

Three forms need more and more of the teacher: the log-prob of the sampled token (one number), its K likeliest tokens,
its whole distribution. Shape letters: B rows, T response tokens, C tokens of a chunk, K tokens of the teacher, V
vocabulary. Everything is differentiable in the student's log-probs and in nothing else. Not here: aggregation over
tokens (`aggregate.agg_loss`), and which tokens count.
"""

from collections.abc import Callable, Mapping

import torch

from hybridrl.algos.kl import kl_penalty

NO_MASS = -1000.0
"""Log-prob of a tail without tokens.

Its probability is exactly 0 in float32; with -inf, p log p would be NaN.
"""


def sampled_token_loss(
    log_probs_BT: torch.Tensor, teacher_log_probs_BT: torch.Tensor, *, kind: str, max_loss: float | None = None
) -> torch.Tensor:
    """Return an estimate (B, T) of the reverse KL from the sampled token alone.

    With d = log s - log p of the sampled token, the estimators are those of `kl.kl_penalty`. Sampled from s, k1 = d and
    k3 have the reverse KL as expectation. As a loss only k2 has its gradient; that of k1 is 0 in expectation.

    Args:
        log_probs_BT: The student's log-probs.
        teacher_log_probs_BT: The teacher's; without gradient.
        kind: An estimator of `kl.kl_penalty`.
        max_loss: Limit on both sides, k1 may be negative. None: none.
    """
    return limited(kl_penalty(log_probs_BT, teacher_log_probs_BT.detach(), kind), max_loss)


def sampled_token_advantages(
    log_probs_BT: torch.Tensor, teacher_log_probs_BT: torch.Tensor, *, kind: str, max_loss: float | None = None
) -> torch.Tensor:
    """Return minus the `sampled_token_loss` (B, T), without gradient, as the advantage of the token.

        A_t = -(log s_t - log p_t)        with kind k1

    Multiplied by grad log s it is an unbiased estimate of minus the gradient of the reverse KL at each token: K. Lu and
    Thinking Machines Lab, "On-Policy Distillation", 2025, with discount 0. A token's effect on later tokens, which
    MiniLLM adds, is left out. No baseline, not whitened.
    """
    return -sampled_token_loss(log_probs_BT, teacher_log_probs_BT, kind=kind, max_loss=max_loss).detach()


def forward_kl(
    log_probs_CV: torch.Tensor, teacher_log_probs_CV: torch.Tensor, *, min_log_prob: float | None = None
) -> torch.Tensor:
    """Return KL(teacher || student) over the whole vocabulary, (C,).

    Args:
        log_probs_CV: The student's log-probs, normalised.
        teacher_log_probs_CV: The teacher's.
        min_log_prob: Lower limit of both. None: none.
    """
    return _kl(*_at_least(min_log_prob, teacher_log_probs_CV.detach(), log_probs_CV))


def reverse_kl(
    log_probs_CV: torch.Tensor, teacher_log_probs_CV: torch.Tensor, *, min_log_prob: float | None = None
) -> torch.Tensor:
    """Return KL(student || teacher) over the whole vocabulary, (C,). Arguments as in `forward_kl`."""
    return _kl(*_at_least(min_log_prob, log_probs_CV, teacher_log_probs_CV.detach()))


def forward_kl_topk(
    log_probs_CV: torch.Tensor,
    teacher_ids_CK: torch.Tensor,
    teacher_log_probs_CK1: torch.Tensor,
    *,
    min_log_prob: float | None = None,
) -> torch.Tensor:
    """Return KL(teacher || student) over the teacher's K tokens and one bin for all others, (C,).

        sum_k p_k log(p_k / s_k) + p_tail log(p_tail / s_tail)        s_tail = 1 - sum_k s_k

    Lumped tails make both distributions sum to 1, so the value is never negative, is at most the whole KL, and is equal
    to it with K = V. Without the tail, as in verl's mode of this name, it is negative wherever the student's mass on
    the K tokens exceeds the teacher's, and does not vanish only at s = p.

    Args:
        log_probs_CV: The student's log-probs, normalised.
        teacher_ids_CK: The teacher's K tokens.
        teacher_log_probs_CK1: Their log-probs (C, K + 1), the last one that of all other tokens.
        min_log_prob: Lower limit of all of them. None: none.
    """
    return forward_kl(top_log_probs(log_probs_CV, teacher_ids_CK), teacher_log_probs_CK1, min_log_prob=min_log_prob)


def reverse_kl_topk(
    log_probs_CV: torch.Tensor,
    teacher_ids_CK: torch.Tensor,
    teacher_log_probs_CK1: torch.Tensor,
    *,
    min_log_prob: float | None = None,
) -> torch.Tensor:
    """Return KL(student || teacher) over the teacher's K tokens and one bin for all others, (C,).

    The tail and the arguments are those of `forward_kl_topk`.
    """
    return reverse_kl(top_log_probs(log_probs_CV, teacher_ids_CK), teacher_log_probs_CK1, min_log_prob=min_log_prob)


def top_ids(log_probs_CV: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k likeliest tokens (C, k) int64, the likeliest first."""
    return log_probs_CV.topk(min(k, log_probs_CV.size(1)), dim=1).indices


def top_log_probs(log_probs_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of these tokens and of all others together, (C, K + 1).

    The last column is that of the others. They are summed themselves: 1 - sum_k would cancel.
    """
    ids_CK = ids_CK.long()
    others_CV = log_probs_CV.scatter(1, ids_CK, NO_MASS)
    tail_C1 = others_CV.logsumexp(dim=1, keepdim=True).clamp(min=NO_MASS)
    empty = ids_CK.size(1) == log_probs_CV.size(1)
    return torch.cat([log_probs_CV.gather(1, ids_CK), torch.full_like(tail_C1, NO_MASS) if empty else tail_C1], dim=1)


def limited(losses: torch.Tensor, max_loss: float | None) -> torch.Tensor:
    """Return the losses within +-max_loss; None: unchanged. Without gradient beyond the limit."""
    return losses if max_loss is None else losses.clamp(-max_loss, max_loss)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _at_least(limit: float | None, *log_probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.clamp(min=NO_MASS if limit is None else limit) for x in log_probs)


DIVERGENCES: Mapping[str, Callable[..., torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "forward_kl_topk": forward_kl_topk,
    "reverse_kl_topk": reverse_kl_topk,
}
"""Divergences (C,) by the name of the setting.

They read more of the teacher than the log-prob of the sampled token.
"""
