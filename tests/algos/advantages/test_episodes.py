"""Advantages of episodes with several rows: an episode counts once in its group."""

import pytest
import torch

from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.errors import DataError

# Two groups of two episodes. Episode 0 has the rows 0, 4 and 6, episode 1 the rows 1 and 5.
EPISODE = torch.tensor([0, 1, 2, 3, 0, 1, 0])
GROUP = torch.tensor([0, 0, 1, 1, 0, 0, 0])
LAST = torch.tensor([2, 0, 1, 2, 2, 2, 2])  # the last place on each row's mask
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]])


def rewards(*scores: float) -> torch.Tensor:
    """Return token rewards with each row's score on its last token of the mask."""
    return torch.zeros(7, 3).scatter(1, LAST[:, None], torch.tensor(scores, dtype=torch.float32)[:, None])


def advantages(name: str, scores: torch.Tensor, **more) -> torch.Tensor:
    return get_adv_estimator(name)(scores, MASK, group_B=GROUP, valid_B=torch.ones(7).bool(), **more)[0]


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "gpg", "maxrl", "raft", "star", "reinforce_plus_plus_baseline"]
)
def test_a_row_has_the_advantage_of_its_episode_on_its_own_tokens(name):
    shared = rewards(1, 3, 0, 2, 1, 3, 1)
    found = advantages(name, shared, episode_B=EPISODE)
    assert (found[MASK == 0] == 0).all()
    # One response per episode with the tokens of all of its rows: 6, 4, 2 and 2.
    lengths = torch.tensor([6, 4, 2, 2])
    whole = torch.zeros(4, 6).scatter(1, lengths[:, None] - 1, torch.tensor([1.0, 3, 0, 2])[:, None])
    mask = (torch.arange(6) < lengths[:, None]).long()
    wanted = get_adv_estimator(name)(whole, mask, group_B=torch.tensor([0, 0, 1, 1]))[0][:, 0]
    assert torch.equal(found, wanted[EPISODE][:, None] * MASK)


def test_a_row_with_a_score_of_its_own_has_the_advantage_that_its_episode_would_have():
    found = advantages("rloo", rewards(1, 3, 0, 2, 1, 7, 5), episode_B=EPISODE)
    # Group 0 has the scores 1 and 3. Row 5: 7 - 1. Row 6: 5 - 3. Row 4 shares 1 - 3.
    assert found.gather(1, LAST[:, None])[:, 0].tolist() == [-2, 2, -2, 2, -2, 6, 2]


def test_episodes_of_one_row_change_nothing_and_a_failed_episode_counts_nowhere():
    scores, alone = rewards(1, 3, 0, 2, 1, 3, 1), torch.arange(7)
    assert torch.equal(advantages("grpo", scores, episode_B=alone), advantages("grpo", scores))
    valid = EPISODE != 1
    found = get_adv_estimator("rloo")(scores, MASK, group_B=GROUP, valid_B=valid, episode_B=EPISODE)[0]
    assert found.gather(1, LAST[:, None])[:, 0].tolist() == [1, 0, -2, 2, 1, 0, 1]  # episode 0 is a group of one


def test_an_estimator_over_time_takes_rows_as_they_are_and_one_by_position_refuses_them():
    scores = rewards(1, 3, 0, 2, 1, 3, 1)
    whole = advantages("reinforce_plus_plus", scores, episode_B=EPISODE)
    assert torch.equal(whole, advantages("reinforce_plus_plus", scores))
    zeros = torch.zeros(7, 3)
    with pytest.raises(DataError, match="position by position.*train_branches=false"):
        advantages(
            *("optimal_token_baseline", scores), episode_B=EPISODE, old_log_probs_BT=zeros, sum_pi_squared_BT=zeros
        )
