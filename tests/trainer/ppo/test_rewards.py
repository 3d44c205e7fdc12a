"""A run that gets no rewards is stopped; one bad batch does not stop it."""

import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.trainer.ppo.rewards import RewardWatch, score

SOME, NONE = torch.tensor([False, True]), torch.zeros(2, dtype=torch.bool)


class Judge(Worker):
    """A reward model that answers with these scores."""

    def __init__(self, scores: list[list[float]]):
        self.scores = scores

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"rm_scores": torch.tensor(self.scores)})


def test_a_reward_model_alone_scores_what_it_can():
    batch = DataProto.from_dict(tensors={"input_ids": torch.zeros(3, 2)})
    scores = [[0.0, 1.5], [0.0, float("nan")], [0.0, -2.0]]
    judge = LocalWorkerGroup(None, ClassWithInitArgs(Judge, scores), role="rm")
    assert score(batch, None, judge=judge, model_input=("input_ids",), metrics={}) == {}
    assert batch.batch["token_level_scores"].tolist() == [[0.0, 1.5], [0.0, 0.0], [0.0, -2.0]]
    assert batch.batch["reward_valid"].tolist() == [True, False, True]


def test_a_first_batch_without_any_reward_stops_the_run():
    with pytest.raises(DataError, match="none of the first 2 samples got a reward"):
        RewardWatch().look_at(NONE)


def test_three_batches_in_a_row_without_any_reward_stop_it_and_fewer_do_not():
    watch = RewardWatch()
    for valid in (SOME, NONE, NONE, SOME, NONE, NONE):
        watch.look_at(valid)
    with pytest.raises(DataError, match="none of the last 3 batches of 2 samples got a reward"):
        watch.look_at(NONE)
