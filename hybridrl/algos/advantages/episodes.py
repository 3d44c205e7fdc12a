"""Advantages of episodes with several rows: conversations of one agent that share a reward.

Shape letters as in `estimator.py`; E episodes. One row of each episode stands for it: its main row. Called by
`AdvantageEstimator` for estimators that compare whole responses.
"""

from collections.abc import Callable
from typing import Any

import torch


def of_episodes(
    fn: Callable[..., torch.Tensor],
    scores_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    episode_B: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Return the advantage of every row, (B,), from statistics over episodes.

        A_i = fn(R, l)_e     with R_e := R_i and l_e the tokens of all rows of e, for row i of episode e

    R are the scores of the main rows. So an episode counts once in its group, however many rows it has, and a row with
    its episode's score has its episode's advantage. A row with a score of its own has the advantage that its episode
    would have with that score.

    Args:
        fn: The estimator's function, of scores and lengths.
        scores_B: Of the rows, float64.
        lengths_B: Trained tokens of the rows, int64.
        episode_B: The main row of each row's episode, int64.
        more: Further arguments of `fn`. Of those with one entry per row, it gets the main rows'.
    """
    is_main_B = episode_B == torch.arange(len(episode_B), device=episode_B.device)
    mains_E = is_main_B.nonzero()[:, 0]
    index_B = torch.searchsorted(mains_E, episode_B)
    own = {name: value[mains_E] if name.endswith(("_B", "_BK")) else value for name, value in more.items()}
    scores_E, lengths_E = scores_B[mains_E], lengths_B.new_zeros(len(mains_E)).index_add_(0, index_B, lengths_B)
    advantages_B = fn(scores_E, lengths_E, **own)[index_B]
    for row in (scores_B != scores_E[index_B]).nonzero()[:, 0]:
        changed_E = scores_E.clone()
        changed_E[index_B[row]] = scores_B[row]
        advantages_B[row] = fn(changed_E, lengths_E, **own)[index_B[row]]
    return advantages_B
