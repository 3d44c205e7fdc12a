"""Running moments of scores: hand-worked numbers, and the same state whatever the cut into batches."""

import pytest
import torch

from hybridrl.algos.reward_moments import RewardMoments


def moments(*batches):
    found = RewardMoments()
    for batch in batches:
        found.update(torch.tensor(batch))
    return found


def test_rewards_of_a_row_sum_to_its_normalised_score():
    found = moments([1.0, 3.0], [5.0])  # mean 3, unbiased variance (4 + 0 + 4) / 2 = 4
    assert (found.mean, found.std) == (3.0, 2.0)
    scores_BT = torch.tensor([[0.0, 1.0, 4.0, 9.0], [7.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    # 1 / 2 and 4 / 2 - 3 / 2; 7 / 2 - 3 / 2; no token
    assert found.normalise(scores_BT, mask_BT).tolist() == [[0, 0.5, 0.5, 0], [2, 0, 0, 0], [0, 0, 0, 0]]


def test_the_moments_do_not_depend_on_the_cut_into_batches_and_are_those_of_torch():
    scores_N = torch.randn(100, dtype=torch.float64) * 3 + 1e4
    whole, parts = RewardMoments(), RewardMoments()
    whole.update(scores_N)
    for part in scores_N[torch.randperm(100)].split([1, 0, 37, 62]):
        parts.update(part)
    assert (parts.mean, parts.std) == pytest.approx((whole.mean, whole.std), rel=1e-12)
    assert (whole.mean, whole.std) == pytest.approx((float(scores_N.mean()), float(scores_N.std())), rel=1e-9)


@pytest.mark.parametrize("batches", [[], [[2.0]], [[2.0, 2.0], [2.0]]])
def test_without_a_spread_scores_are_only_shifted(batches):
    assert moments(*batches).std == 1


def test_a_state_comes_back_and_a_checkpoint_without_one_starts_anew():
    found, other = moments([1.0, 3.0]), moments([7.0])
    other.load("", found.save(""))
    assert other.state_dict() == found.state_dict() == {"count": 2, "mean": 2.0, "sum_of_squares": 2.0}
    other.load("", None)
    assert other.count == 0
