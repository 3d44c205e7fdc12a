"""Estimators that compare the responses to one prompt: GRPO, RLOO and relatives.

Shape letters and conventions as in `estimator.py`. R_i is the sum of row i's rewards, g its group. Rows with a failed
reward are in no group.
"""

import torch

from hybridrl.algos.advantages.estimator import register_adv_est
from hybridrl.algos.masked import masked_sum, masked_whiten

GROUP_STD_EPS = 1e-6
"""Added to a group's standard deviation, as in verl: a group in which all scores are equal has advantage 0."""


@register_adv_est("grpo_vectorized", needs_group=True)
@register_adv_est("grpo", needs_group=True)
def grpo(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    group_B: torch.Tensor,
    norm_by_std: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages, arXiv:2402.03300, section 4.1.2.

        A_i = (R_i - mean_g) / (std_g + 1e-6)        R_i = sum_t r_t, the same for all tokens of row i

    std_g is unbiased. `norm_by_std=False`: A_i = R_i - mean_g (Dr. GRPO, arXiv:2503.20783). A group of one has mean 0
    and std 1, as in verl.

    Returns:
        Advantages, not whitened, and the same as returns.
    """
    scores_B, mean_B, std_B, _ = group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    advantages_B = scores_B - mean_B
    if norm_by_std:
        advantages_B = advantages_B / (std_B + GROUP_STD_EPS)
    advantages_BT = on_every_token(advantages_B, token_level_rewards_BT, response_mask_BT)
    return advantages_BT, advantages_BT


@register_adv_est("rloo_vectorized", needs_group=True)
@register_adv_est("rloo", needs_group=True)
def rloo(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave-one-out baseline, arXiv:2402.14740.

        A_i = R_i - mean of the other n - 1 scores of its group = n / (n - 1) (R_i - mean_g)

    A group of one has no baseline: A_i = R_i.

    Returns:
        Advantages, not whitened, and the same as returns.
    """
    scores_B, mean_B, _, count_B = group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    advantages_B = (scores_B - mean_B) * count_B / (count_B - 1).clamp(min=1)
    advantages_BT = on_every_token(advantages_B, token_level_rewards_BT, response_mask_BT)
    return advantages_BT, advantages_BT


@register_adv_est("reinforce_plus_plus_baseline", needs_group=True)
def reinforce_plus_plus_baseline(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ with the group's mean as baseline, arXiv:2501.03262.

        A = whiten(R_i - mean_g) over all tokens of the batch

    A group of one has mean 0, as in verl. There is no division by the group's std.

    Returns:
        Advantages and the same as returns.
    """
    scores_B, mean_B, _, _ = group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    centred_BT = on_every_token(scores_B - mean_B, token_level_rewards_BT, response_mask_BT)
    advantages_BT = masked_whiten(centred_BT, response_mask_BT)
    return advantages_BT, advantages_BT


@register_adv_est("opo", needs_group=True)
def opo(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """On-policy RL with the optimal reward baseline, arXiv:2505.23585 equation 6.

        A_i = R_i - (sum_g length_j R_j) / (sum_g length_j)

    The baseline minimises the gradient's variance if its square is proportional to the length. A group of one has
    advantage 0.

    Returns:
        Advantages and the same as returns.
    """
    scores_B = group_statistics(token_level_rewards_BT, response_mask_BT, group_B)[0]
    length_B = response_mask_BT.bool().sum(dim=1).double()
    baseline_B = per_group_sum(length_B * scores_B, group_B) / per_group_sum(length_B, group_B).clamp(min=1)
    advantages_BT = on_every_token(scores_B - baseline_B, token_level_rewards_BT, response_mask_BT)
    return advantages_BT, advantages_BT


@register_adv_est("gpg", needs_group=True)
def gpg(
    token_level_rewards_BT: torch.Tensor, response_mask_BT: torch.Tensor, *, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group policy gradient, arXiv:2504.02546 equations 5 and 7.

        A_i = alpha (R_i - mean_g)        alpha = rows / rows in groups whose scores are not all equal

    alpha makes up for groups without a gradient. verl counts rows with a score other than 0 instead, which is the
    paper's number only if a score of 0 means that the whole group failed.

    Returns:
        Advantages and the same as returns.
    """
    scores_B, mean_B, std_B, count_B = group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    counted_B = response_mask_BT.bool().any(dim=1)
    teaches_B = counted_B & (count_B > 1) & (std_B > GROUP_STD_EPS)
    alpha = counted_B.sum() / teaches_B.sum().clamp(min=1)
    advantages_BT = on_every_token(alpha * (scores_B - mean_B), token_level_rewards_BT, response_mask_BT)
    return advantages_BT, advantages_BT


@register_adv_est("grpo_passk", needs_group=True)
def grpo_passk(
    token_level_rewards_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    *,
    group_B: torch.Tensor,
    norm_by_std: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of the best of k, arXiv:2503.19595 equation 9.

        A_i = (R_max - R_2nd) / (std_g + 1e-6) for the best row of its group, 0 for the others

    It is the gain in the best score through row i. `norm_by_std=False`: without the division. If two rows share the
    best score, and in a group of one, all advantages are 0.

    Returns:
        Advantages and the same as returns.
    """
    scores_B, _, std_B, count_B = group_statistics(token_level_rewards_BT, response_mask_BT, group_B)
    best_B, second_B = _two_best(scores_B, response_mask_BT.bool().any(dim=1), group_B)
    gain_B = torch.where((scores_B == best_B) & (count_B > 1), best_B - second_B, torch.zeros_like(scores_B))
    if norm_by_std:
        gain_B = gain_B / (std_B + GROUP_STD_EPS)
    advantages_BT = on_every_token(gain_B, token_level_rewards_BT, response_mask_BT)
    return advantages_BT, advantages_BT


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


def group_statistics(
    rewards_BT: torch.Tensor, mask_BT: torch.Tensor, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each row its score sum_t r_t and its group's mean, unbiased std and count.

    All are float64: the mean of equal float32 scores is not always that score, and GRPO divides the difference by about
    1e-6. Rows without a token on the mask are not counted. A group of one (or none) has mean 0 and std 1.
    """
    scores_B, counted_B = masked_sum(rewards_BT.double(), mask_BT, dim=1), mask_BT.bool().any(dim=1).double()
    ids_G, index_B = torch.unique(group_B, return_inverse=True)

    def per_group(terms_B: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids_G), dtype=torch.float64, device=scores_B.device).index_add_(
            0, index_B, terms_B * counted_B
        )

    count_G = per_group(torch.ones_like(scores_B))
    mean_G = per_group(scores_B) / count_G.clamp(min=1)
    std_G = (per_group((scores_B - mean_G[index_B]) ** 2) / (count_G - 1).clamp(min=1)).sqrt()
    mean_G = torch.where(count_G > 1, mean_G, torch.zeros_like(mean_G))
    std_G = torch.where(count_G > 1, std_G, torch.ones_like(std_G))
    return scores_B, mean_G[index_B], std_G[index_B], count_G[index_B]


def per_group_sum(terms_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return for each row the sum of its group's terms, (B,) float64."""
    ids_G, index_B = torch.unique(group_B, return_inverse=True)
    sums_G = torch.zeros(len(ids_G), dtype=torch.float64, device=terms_B.device)
    return sums_G.index_add_(0, index_B, terms_B.double())[index_B]


def on_every_token(advantages_B: torch.Tensor, like_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return each row's advantage on all of its tokens, 0 off the mask, (B, T) with the dtype of `like_BT`."""
    return torch.where(mask_BT.bool(), advantages_B.to(like_BT.dtype)[:, None], torch.zeros_like(like_BT))
