"""Rewards for the length of a response, compared with the other responses to its prompt.

Shape letters: B rows. The penalty near the length limit, DAPO's, is in `rewards/other_managers.py`.
"""

import torch


def length_rewards(
    lengths_B: torch.Tensor, right_B: torch.Tensor, valid_B: torch.Tensor, *, group_B: torch.Tensor
) -> torch.Tensor:
    """Return the length reward of each row, Kimi k1.5, arXiv:2501.12599, section 2.3.3.

        lambda_i = 1/2 - (l_i - min_g l) / (max_g l - min_g l)
        lambda_i if the response is right, min(0, lambda_i) if it is not

    It is 0 in a group of equal lengths. Invalid rows have 0 and do not count in their group. Not here: its weight, and
    the paper's first phase without it.

    Args:
        lengths_B: Tokens of each response.
        right_B: Which responses are right, bool.
        valid_B: Rows that count, bool.
        group_B: Number of each row's group, int64.

    Returns:
        (B,) float64, between -1/2 and 1/2.
    """
    length_B = lengths_B.double()
    ids_G, index_B = torch.unique(group_B, return_inverse=True)
    shortest_G = _reduced(torch.where(valid_B, length_B, torch.inf), index_B, len(ids_G), "amin")
    longest_G = _reduced(torch.where(valid_B, length_B, -torch.inf), index_B, len(ids_G), "amax")
    spread_B = (longest_G - shortest_G)[index_B]
    counted_B = valid_B & (spread_B > 0)
    part_B = torch.where(counted_B, length_B - shortest_G[index_B], 0.0) / spread_B.where(counted_B, 1.0)
    reward_B = 0.5 - part_B
    reward_B = torch.where(right_B, reward_B, reward_B.clamp(max=0))
    return torch.where(counted_B, reward_B, 0.0)


def _reduced(values_B: torch.Tensor, index_B: torch.Tensor, num_groups: int, reduce: str) -> torch.Tensor:
    start_G = torch.full((num_groups,), torch.inf if reduce == "amin" else -torch.inf, dtype=values_B.dtype)
    return start_G.scatter_reduce(0, index_B, values_B, reduce)
