"""A run that gets no rewards is stopped; one bad batch does not stop it."""

import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.rewards import RewardManager
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.trainer.ppo.columns import MODEL_INPUT
from hybridrl.trainer.ppo.rewards import (
    NoRewardGuard,
    NoSignalWarning,
    check_data_sources,
    score_batch,
)

SOME, NONE = torch.tensor([False, True]), torch.zeros(2, dtype=torch.bool)


class FixedRewardModel(Worker):
    """A reward model that returns these scores."""

    def __init__(self, scores: list[list[float]]):
        self.scores = scores

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"rm_scores": torch.tensor(self.scores)})


def test_without_a_reward_function_finite_reward_model_scores_are_the_rewards():
    batch = DataProto.from_dict(tensors={name: torch.zeros(3, 2) for name in MODEL_INPUT})
    scores = [[0.0, 1.5], [0.0, float("nan")], [0.0, -2.0]]
    reward_model = LocalWorkerGroup(None, ClassWithInitArgs(FixedRewardModel, scores), role="rm")
    assert score_batch(batch, None, reward_model=reward_model, metrics={}) == {}
    assert batch.batch["token_level_scores"].tolist() == [[0.0, 1.5], [0.0, 0.0], [0.0, -2.0]]
    assert batch.batch["reward_valid"].tolist() == [True, False, True]


def test_a_first_batch_without_any_reward_stops_the_run():
    with pytest.raises(DataError, match="none of the first 2 samples"):
        NoRewardGuard().check(NONE)


def test_three_batches_in_a_row_without_any_reward_stop_it_and_fewer_do_not():
    guard = NoRewardGuard()
    for valid in (SOME, NONE, NONE, SOME, NONE, NONE):
        guard.check(valid)
    with pytest.raises(DataError, match="none of the last 3 batches of 2"):
        guard.check(NONE)


def step(*, advantage=1.0, cut=0.5):
    return {
        "critic/advantages/max": advantage,
        "critic/advantages/min": -advantage,
        "critic/score/mean": 0.25,
        "response_length/clip_ratio": cut,
    }


def test_steps_that_teach_nothing_are_named_once(caplog):
    warning = NoSignalWarning()
    steps = [step(advantage=0.0)] * 4 + [step()] + [step(advantage=0.0, cut=1.0)] * 12
    for number, metrics in enumerate(steps, 1):
        warning.check(metrics, step=number)
    equal, cut = caplog.messages
    assert equal.startswith("step 10: all advantages of the last 5 steps are 0 (the mean score is 0.25 now)")
    assert cut.startswith("step 10: every response of the last 5 steps was cut at data.max_response_length")


def test_a_step_without_any_rewarded_sample_is_not_taken_for_equal_rewards(caplog):
    warning = NoSignalWarning()
    for number in range(9):
        warning.check(step(advantage=float("nan")), step=number)
    assert not caplog.messages


def test_a_data_source_that_the_built_in_function_cannot_score_is_refused_with_its_row():
    class Data:
        def data_sources(self):
            return {"openai/gsm8k": "a.parquet row 0", "nobody/knows": "a.parquet row 7"}

    built_in, own = RewardManager(None), RewardManager(None, compute_score=lambda **_: 1.0)
    with pytest.raises(DataError, match="^a.parquet row 7: .*data_source='nobody/knows'; there "):
        check_data_sources(Data(), built_in)
    check_data_sources(Data(), own)
    check_data_sources([{"data_source": "nobody/knows"}], built_in)  # a dataset of the user's: not asked


def test_a_data_source_without_ground_truths_is_refused_for_the_built_in_functions():
    class Data:
        has_ground_truths = False

        def data_sources(self):
            return {"environment": "a.parquet row 0", "openai/gsm8k": "a.parquet row 1"}

    with pytest.raises(DataError, match=r"^a.parquet row 1: no row has a ground truth .*data.ground_truth_key=COLUMN"):
        check_data_sources(Data(), RewardManager(None))
    check_data_sources(Data(), RewardManager(None, compute_score=lambda **_: 1.0))
