"""The formulas of `hybridrl.algos` as in their papers, in plain torch: what `algorithms_time.py` measures against.

Each is what a careful author writes first: full tensors, a loop over groups or over tokens, autograd for the gradient.
Shape letters as in `hybridrl.algos`. Masks are float, rewards 0 off the mask, and no response has a gap.
"""

from collections import defaultdict
from collections.abc import Callable

import torch

EPS = 1e-6
LIMIT = 20.0  # of log ratios
Estimate = tuple[torch.Tensor, torch.Tensor]  # advantages and returns (B, T)


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return (values_BT * mask_BT).sum() / mask_BT.sum()


def whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    mean, count = masked_mean(values_BT, mask_BT), mask_BT.sum()
    var = ((values_BT - mean) ** 2 * mask_BT).sum() / (count - 1)
    return (values_BT - mean) * torch.rsqrt(var + 1e-8) * mask_BT


# --- estimators


def by_group(advantages_n: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Estimate]:
    """Return an estimator that loops over groups. advantages_n: from the scores of one group to their advantages."""

    def estimate(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, group_B: torch.Tensor) -> Estimate:
        scores_B, rows = rewards_BT.sum(1), defaultdict(list)
        for row, group in enumerate(group_B.tolist()):
            rows[group].append(row)
        advantages_B = torch.empty_like(scores_B)
        for members in rows.values():
            advantages_B[members] = advantages_n(scores_B[members])
        advantages_BT = advantages_B[:, None] * mask_BT
        return advantages_BT, advantages_BT

    return estimate


def by_index(advantages_B: Callable[..., torch.Tensor]) -> Callable[..., Estimate]:
    """Return an estimator without a loop. advantages_B: of scores_B, and of means, stds and sizes of their groups."""

    def estimate(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, group_B: torch.Tensor) -> Estimate:
        scores_B = rewards_BT.sum(1)
        ids_G, index_B = torch.unique(group_B, return_inverse=True)
        count_G = torch.bincount(index_B)
        mean_B = (torch.zeros(len(ids_G)).index_add_(0, index_B, scores_B) / count_G)[index_B]
        squares_G = torch.zeros(len(ids_G)).index_add_(0, index_B, (scores_B - mean_B) ** 2)
        std_B = (squares_G / (count_G - 1)).sqrt()[index_B]
        advantages_BT = advantages_B(scores_B, mean_B, std_B, count_G[index_B])[:, None] * mask_BT
        return advantages_BT, advantages_BT

    return estimate


def reinforce_plus_plus_baseline(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, group_B: torch.Tensor) -> Estimate:
    advantages_BT, _ = by_index(lambda score, mean, std, count: score - mean)(rewards_BT, mask_BT, group_B)
    advantages_BT = whiten(advantages_BT, mask_BT)
    return advantages_BT, advantages_BT


def reinforce_plus_plus(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, gamma: float) -> Estimate:
    returns_BT, running_B = torch.zeros_like(rewards_BT), torch.zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        running_B = (rewards_BT[:, t] + gamma * running_B) * mask_BT[:, t]
        returns_BT[:, t] = running_B
    return whiten(returns_BT, mask_BT), returns_BT


def remax(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, baseline_B: torch.Tensor) -> Estimate:
    returns_BT = (rewards_BT * mask_BT).flip(1).cumsum(1).flip(1) * mask_BT
    return returns_BT - baseline_B[:, None] * mask_BT, returns_BT


def gae(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, values_BT: torch.Tensor, gamma: float, lam: float) -> Estimate:
    advantages_BT = torch.zeros_like(rewards_BT)
    next_value_B = running_B = torch.zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        running_B = (delta_B + gamma * lam * running_B) * mask_BT[:, t]
        next_value_B = values_BT[:, t] * mask_BT[:, t]
        advantages_BT[:, t] = running_B
    return whiten(advantages_BT, mask_BT), (advantages_BT + values_BT) * mask_BT


GROUP_LOOPS = {
    "grpo": by_group(lambda score: (score - score.mean()) / (score.std() + EPS)),
    "rloo": by_group(lambda score: (score - score.mean()) * len(score) / (len(score) - 1)),
}
GROUP_VECTORS = {
    "grpo": by_index(lambda score, mean, std, count: (score - mean) / (std + EPS)),
    "rloo": by_index(lambda score, mean, std, count: (score - mean) * count / (count - 1)),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


# --- policy losses: from logp, old logp, advantages and mask to loss, clipped share and k1; all means over tokens

Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def vanilla(logp_BT: torch.Tensor, old_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> Terms:
    log_ratio_BT = (logp_BT - old_BT).clamp(-LIMIT, LIMIT)
    ratio_BT = log_ratio_BT.exp()
    plain_BT, limited_BT = -advantages_BT * ratio_BT, -advantages_BT * ratio_BT.clamp(0.8, 1.2)
    losses_BT = torch.maximum(plain_BT, limited_BT)
    losses_BT = torch.where(advantages_BT < 0, torch.minimum(losses_BT, -3.0 * advantages_BT), losses_BT)
    return _means(losses_BT, (limited_BT > plain_BT).float(), -log_ratio_BT, mask_BT)


def gspo(logp_BT: torch.Tensor, old_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> Terms:
    log_ratio_BT = logp_BT - old_BT
    mean_B = (log_ratio_BT * mask_BT).sum(1) / mask_BT.sum(1)
    ratio_BT = (logp_BT - logp_BT.detach() + mean_B.detach()[:, None]).clamp(max=10).exp()
    plain_BT, limited_BT = -advantages_BT * ratio_BT, -advantages_BT * ratio_BT.clamp(0.8, 1.2)
    return _means(torch.maximum(plain_BT, limited_BT), (limited_BT > plain_BT).float(), -log_ratio_BT, mask_BT)


def geo_mean(logp_BT: torch.Tensor, old_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> Terms:
    log_ratio_BT, sign_BT, tokens_B = logp_BT - old_BT, torch.sign(advantages_BT), mask_BT.sum(1)
    plain_BT, limited_BT = sign_BT * log_ratio_BT, sign_BT * log_ratio_BT.clamp(-0.2, 0.2)
    ratio_B = ((sign_BT * torch.minimum(plain_BT, limited_BT) * mask_BT).sum(1) / tokens_B).exp()
    losses_B = -(advantages_BT * mask_BT).sum(1) / tokens_B * ratio_B
    clipped_BT = (limited_BT < plain_BT).float()
    return losses_B.mean(), masked_mean(clipped_BT, mask_BT), masked_mean(-log_ratio_BT.detach(), mask_BT)


def cispo(logp_BT: torch.Tensor, old_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> Terms:
    log_ratio_BT = (logp_BT - old_BT).clamp(-LIMIT, LIMIT)
    ratio_BT = log_ratio_BT.detach().exp()
    weight_BT = ratio_BT.clamp(0.8, 1.2)
    return _means(
        -weight_BT * advantages_BT * logp_BT, (weight_BT != ratio_BT).float(), -log_ratio_BT.detach(), mask_BT
    )


def gpg(logp_BT: torch.Tensor, old_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> Terms:
    nothing = torch.zeros(())
    return masked_mean(-advantages_BT * logp_BT, mask_BT), nothing, masked_mean(old_BT - logp_BT.detach(), mask_BT)


def _means(losses_BT: torch.Tensor, clipped_BT: torch.Tensor, kl_BT: torch.Tensor, mask_BT: torch.Tensor) -> Terms:
    return masked_mean(losses_BT, mask_BT), masked_mean(clipped_BT, mask_BT), masked_mean(kl_BT.detach(), mask_BT)


POLICY_LOSSES = {"vanilla": vanilla, "gspo": gspo, "geo_mean": geo_mean, "cispo": cispo, "gpg": gpg}


def value_loss(values_BT: torch.Tensor, old_BT: torch.Tensor, returns_BT: torch.Tensor, mask_BT: torch.Tensor):
    limited_BT = torch.minimum(torch.maximum(values_BT, old_BT - 0.5), old_BT + 0.5)
    return masked_mean(0.5 * torch.maximum((values_BT - returns_BT) ** 2, (limited_BT - returns_BT) ** 2), mask_BT)


# --- aggregation

AGGREGATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token-mean": masked_mean,
    "token-sum": lambda losses_BT, mask_BT: (losses_BT * mask_BT).sum(),
    "seq-mean-token-sum": lambda losses_BT, mask_BT: (losses_BT * mask_BT).sum(1).mean(),
    "seq-mean-token-mean": lambda losses_BT, mask_BT: ((losses_BT * mask_BT).sum(1) / mask_BT.sum(1)).mean(),
    "seq-mean-token-sum-norm": lambda losses_BT, mask_BT: (losses_BT * mask_BT).sum(1).mean() / losses_BT.shape[1],
}
