"""A run that gets no rewards is stopped; one bad batch does not stop it."""

import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.trainer.scoring import RewardWatch

SOME, NONE = torch.tensor([False, True]), torch.zeros(2, dtype=torch.bool)


def test_a_first_batch_without_any_reward_stops_the_run():
    with pytest.raises(DataError, match="none of the first 2 samples got a reward"):
        RewardWatch().look_at(NONE)


def test_three_batches_in_a_row_without_any_reward_stop_it_and_fewer_do_not():
    watch = RewardWatch()
    for valid in (SOME, NONE, NONE, SOME, NONE, NONE):
        watch.look_at(valid)
    with pytest.raises(DataError, match="none of the last 3 batches of 2 samples got a reward"):
        watch.look_at(NONE)
