"""Estimators that compare the responses to one prompt: GRPO, RLOO and relatives.

Shape letters as in `estimator.py`. R_i is row i's score, the sum of its rewards, l_i its number of tokens, g its group.
All of them map scores_B float64 and lengths_B int64 to advantages_B float64, which hold for every token of a row and
are also the returns. A row of length 0, for instance with a failed reward, is in no group. Not whitened unless it says
so.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridrl.algos.advantages.estimator import register_adv_est
from hybridrl.algos.masked import WHITEN_EPS
from hybridrl.errors import DataError

GROUP_STD_EPS = 1e-6
"""Added to a group's standard deviation, as in verl: a group in which all scores are equal has advantage 0."""


@register_adv_est("grpo_vectorized", needs_group=True, per_response=True)
@register_adv_est("grpo", needs_group=True, per_response=True)
def grpo(
    scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor, norm_by_std: bool = True
) -> torch.Tensor:
    """Group-relative advantages, arXiv:2402.03300, section 4.1.2.

        A_i = (R_i - mean_g) / (std_g + 1e-6)

    std_g is unbiased. `norm_by_std=False`: A_i = R_i - mean_g (Dr. GRPO, arXiv:2503.20783). A group of one has mean 0
    and std 1, as in verl; so has the only response of a group whose others failed.
    """
    group = group_statistics(scores_B, lengths_B, group_B)
    centred_B = scores_B - group.mean_B
    return centred_B / (group.std_B + GROUP_STD_EPS) if norm_by_std else centred_B


@register_adv_est("rloo_vectorized", needs_group=True, per_response=True)
@register_adv_est("rloo", needs_group=True, per_response=True)
def rloo(scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor) -> torch.Tensor:
    """Leave-one-out baseline, arXiv:2402.14740.

        A_i = R_i - mean of the other n - 1 scores of its group = n / (n - 1) (R_i - mean_g)

    A group of one has no baseline: A_i = R_i.
    """
    group = group_statistics(scores_B, lengths_B, group_B)
    return (scores_B - group.mean_B) * group.count_B / (group.count_B - 1).clamp(min=1)


@register_adv_est("reinforce_plus_plus_baseline", needs_group=True, per_response=True)
def reinforce_plus_plus_baseline(
    scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor
) -> torch.Tensor:
    """REINFORCE++ with the group's mean as baseline, arXiv:2501.03262.

        A = whiten(R_i - mean_g) over all tokens of the batch

    A group of one has mean 0, as in verl. There is no division by the group's std.
    """
    return whiten_over_tokens(scores_B - group_statistics(scores_B, lengths_B, group_B).mean_B, lengths_B)


@register_adv_est("opo", needs_group=True, per_response=True)
def opo(scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor) -> torch.Tensor:
    """On-policy RL with the optimal reward baseline, arXiv:2505.23585 equation 6.

        A_i = R_i - (sum_g l_j R_j) / (sum_g l_j)

    The baseline minimises the gradient's variance if its square is proportional to the length. A group of one has
    advantage 0.
    """
    weighted_B = per_group_sum(lengths_B * scores_B, group_B)
    return scores_B - weighted_B / per_group_sum(lengths_B, group_B).clamp(min=1)


@register_adv_est("gpg", needs_group=True, per_response=True)
def gpg(scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor) -> torch.Tensor:
    """Group policy gradient, arXiv:2504.02546 equations 5 and 7.

        A_i = alpha (R_i - mean_g)        alpha = rows / rows in groups whose scores are not all equal

    alpha makes up for groups without a gradient. verl counts rows with a score other than 0 instead, which is the
    paper's number only if a score of 0 means that the whole group failed.
    """
    group, counted_B = group_statistics(scores_B, lengths_B, group_B), lengths_B > 0
    teaches_B = counted_B & (group.count_B > 1) & (group.std_B > GROUP_STD_EPS)
    return counted_B.sum() / teaches_B.sum().clamp(min=1) * (scores_B - group.mean_B)


@register_adv_est("grpo_passk", needs_group=True, per_response=True)
def grpo_passk(
    scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor, norm_by_std: bool = True
) -> torch.Tensor:
    """Advantage of the best of k, arXiv:2503.19595 equation 9.

        A_i = (R_max - R_2nd) / (std_g + 1e-6) for the best row of its group, 0 for the others

    It is the gain in the best score through row i. `norm_by_std=False`: without the division. If two rows share the
    best score, and in a group of one, all advantages are 0.
    """
    group = group_statistics(scores_B, lengths_B, group_B)
    best_B, second_B = _two_best(scores_B, lengths_B > 0, group_B)
    gain_B = torch.where((scores_B == best_B) & (group.count_B > 1), best_B - second_B, 0.0)
    return gain_B / (group.std_B + GROUP_STD_EPS) if norm_by_std else gain_B


@register_adv_est("maxrl", needs_group=True, per_response=True)
def maxrl(scores_B: torch.Tensor, lengths_B: torch.Tensor, *, group_B: torch.Tensor) -> torch.Tensor:
    """Maximum-likelihood reinforcement learning, arXiv:2602.02710.

        A_i = (R_i - mean_g) / mean_g,        0 in a group whose scores are all 0

    With scores of 0 and 1, k of n right, it is n / k - 1 for a right response and -1 for a wrong one. The average
    gradient is then the mean score function of the right responses minus that of all responses. It estimates the
    gradient of log p(right), truncated at n terms, where GRPO without std estimates that of p(right). Scores between
    are taken as they are. The TRL trainer of this name adds 1e-6 to the mean.

    Raises:
        DataError: A score is negative: log p needs scores of 0 or more.
    """
    counted_B = lengths_B > 0
    if (scores_B[counted_B] < 0).any():
        lowest = float(scores_B[counted_B].min())
        raise DataError(
            f"algorithm.adv_estimator=maxrl divides by the mean score of a group, and a score is {lowest:g}; give "
            "scores of 0 or more, for instance 0 and 1, and leave the KL out of the reward"
        )
    sums_B = per_group_sum(torch.where(counted_B, scores_B, 0.0), group_B)
    mean_B = sums_B / per_group_sum(counted_B, group_B).clamp(min=1)
    return torch.where(mean_B > 0, (scores_B - mean_B) / mean_B, 0.0)


@register_adv_est("gdpo", needs_group=True, needs=("components_BK",), per_response=True)
def gdpo(
    scores_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    group_B: torch.Tensor,
    components_BK: torch.Tensor,
    component_weights: Sequence[float] | None = None,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """Group reward-decoupled normalisation of several rewards, arXiv:2601.05242 equations 4 to 6.

        A_i = whiten(sum_k w_k (r_ik - mean_gk) / (std_gk + 1e-6)) over all tokens of the batch

    Each reward k is normalised in its group by itself, so that no combination of rewards is lost in the sum. GRPO
    normalises the sum. The scores themselves are not read. The paper whitens over responses; the authors' code for verl
    and verl itself over tokens, and so does this.

    Args:
        components_BK: The rewards of each response.
        component_weights: K numbers. None: all 1.
    """
    components_BK = components_BK.double()
    weights = component_weights or [1.0] * components_BK.shape[1]
    if len(weights) != components_BK.shape[1]:
        raise DataError(f"{len(weights)} weights {list(weights)} for {components_BK.shape[1]} rewards of a response")
    total_B = torch.zeros_like(scores_B)
    for weight, component_B in zip(weights, components_BK.unbind(1), strict=True):
        total_B += weight * grpo(component_B, lengths_B, group_B=group_B, norm_by_std=norm_by_std)
    return whiten_over_tokens(total_B, lengths_B)


def _two_best(
    scores_B: torch.Tensor, counted_B: torch.Tensor, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row the best and the second best score of its group; both, if two rows share the best."""
    ids_G, index_B = torch.unique(group_B, return_inverse=True)
    order_B = torch.where(counted_B, scores_B, -torch.inf).argsort(descending=True)
    order_B = order_B[index_B[order_B].argsort(stable=True)]  # by group, the best first
    start_G = torch.searchsorted(index_B[order_B], torch.arange(len(ids_G), device=scores_B.device))
    size_G = torch.bincount(index_B, minlength=len(ids_G))
    second_G = order_B[start_G + (size_G > 1).long()]
    return scores_B[order_B[start_G]][index_B], scores_B[second_G][index_B]


class GroupStatistics(NamedTuple):
    """Mean, unbiased standard deviation and number of rows of each row's group, (B,) float64."""

    mean_B: torch.Tensor
    std_B: torch.Tensor
    count_B: torch.Tensor


def group_statistics(scores_B: torch.Tensor, lengths_B: torch.Tensor, group_B: torch.Tensor) -> GroupStatistics:
    """Return the statistics of each row's group. Rows of length 0 are not counted.

    A group of one (or none) has mean 0 and std 1.
    """
    counted_B = (lengths_B > 0).double()
    ids_G, index_B = torch.unique(group_B, return_inverse=True)

    def per_group(terms_B: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids_G), dtype=torch.float64, device=terms_B.device).index_add_(
            0, index_B, terms_B.double() * counted_B
        )

    count_G = per_group(counted_B)
    mean_G = per_group(scores_B) / count_G.clamp(min=1)
    std_G = (per_group((scores_B - mean_G[index_B]) ** 2) / (count_G - 1).clamp(min=1)).sqrt()
    mean_G = torch.where(count_G > 1, mean_G, 0.0)
    std_G = torch.where(count_G > 1, std_G, 1.0)
    return GroupStatistics(mean_G[index_B], std_G[index_B], count_G[index_B])


def per_group_sum(terms_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return for each row the sum of its group's terms, (B,) float64."""
    ids_G, index_B = torch.unique(group_B, return_inverse=True)
    sums_G = torch.zeros(len(ids_G), dtype=torch.float64, device=terms_B.device)
    return sums_G.index_add_(0, index_B, terms_B.double())[index_B]


def whiten_over_tokens(advantages_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return what `masked_whiten` returns for advantages that are the same on all tokens of a row, (B,) float64."""
    tokens_B = lengths_B.double()
    count = tokens_B.sum()
    mean = (tokens_B * torch.where(lengths_B > 0, advantages_B, 0.0)).sum() / count.clamp(min=1)
    centred_B = torch.where(lengths_B > 0, advantages_B - mean, 0.0)
    var = (tokens_B * centred_B**2).sum() / (count - 1).clamp(min=1)
    return centred_B * torch.rsqrt(var + WHITEN_EPS)
