"""A run that gets no rewards is stopped; one bad batch does not stop it."""

import numpy as np
import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.rewards import RewardManager
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.trainer.ppo.rewards import (
    NoRewardGuard,
    NoSignalWarning,
    add_length_rewards,
    add_reward_baselines,
    add_reward_components,
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
    batch = DataProto.from_dict(tensors={"input_ids": torch.zeros(3, 2)})
    scores = [[0.0, 1.5], [0.0, float("nan")], [0.0, -2.0]]
    reward_model = LocalWorkerGroup(None, ClassWithInitArgs(FixedRewardModel, scores), role="rm")
    assert score_batch(batch, None, reward_model=reward_model, model_input=("input_ids",), metrics={}) == {}
    assert batch.batch["token_level_scores"].tolist() == [[0.0, 1.5], [0.0, 0.0], [0.0, -2.0]]
    assert batch.batch["reward_valid"].tolist() == [True, False, True]


def scored(scores, uids, *, valid=None):
    scores_BR = torch.tensor([[0.0, score] for score in scores])
    valid_B = torch.ones(len(scores), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return DataProto.from_dict(
        tensors={"token_level_scores": scores_BR, "reward_valid": valid_B},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )


@pytest.mark.parametrize("extra", [{}, {"acc": [True, 1, 0.0, None]}])
def test_length_rewards_are_added_to_the_last_token_of_right_responses(extra):
    batch = scored([1.0, 1.0, -1.0, 5.0], ["a"] * 4, valid=[True, True, True, False])
    mask_BR = torch.tensor([[1, 0], [1, 1], [1, 0], [1, 1]])
    batch.batch["responses"], batch.batch["response_mask"] = torch.zeros(4, 2, dtype=torch.int64), mask_BR
    batch.batch["attention_mask"] = torch.cat([torch.ones(4, 3, dtype=torch.int64), mask_BR], dim=1)
    # One and two tokens: 1/2 and -1/2, for a wrong response at most 0, without a valid reward nothing.
    assert add_length_rewards(batch, extra, coef=0.5) == [0.25, -0.25, 0.0, 0.0]
    assert batch.batch["token_level_scores"].tolist() == [[0.25, 1.0], [0.0, 0.75], [0.0, -1.0], [0.0, 5.0]]


def test_the_baseline_of_a_row_is_the_score_of_the_greedy_response_to_its_prompt():
    batch = scored([1.0, 0.0, 0.5, 2.0], ["b", "a", "b", "c"], valid=[True, True, False, True])
    metrics = add_reward_baselines(batch, scored([0.25, 0.75, 9.0], ["a", "b", "c"], valid=[True, True, False]))
    assert batch.batch["reward_baselines"][:3].tolist() == [0.75, 0.25, 0.75]
    assert batch.batch["reward_valid"].tolist() == [True, True, False, False]
    assert metrics == {"reward/baseline/mean": 0.5, "reward/baseline/num_failed": 1.0}


def test_several_rewards_of_a_response_become_columns_and_a_row_without_one_is_invalid(caplog):
    batch = scored([3.0, 4.0, 0.0, 6.0], list("aabb"), valid=[True, True, False, True])
    extra = {"format": [True, 0.5, None, None], "note": ["x", "y", None, "z"]}
    add_reward_components(batch, extra, ["format", "score"])
    assert batch.batch["reward_components"].tolist() == [[1, 3], [0.5, 4], [0, 0], [0, 0]]
    assert batch.batch["reward_valid"].tolist() == [True, True, False, False]
    assert "1 of 4 samples lack a number under ['format', 'score']" in caplog.text


def test_a_reward_that_the_function_never_returns_is_named():
    with pytest.raises(DataError, match=r"gdpo_reward_keys=\['style'\]: .* returned no 'style', only score, format"):
        add_reward_components(scored([1.0], ["a"]), {"format": [1]}, ["style"])


def test_a_first_batch_without_any_reward_stops_the_run():
    with pytest.raises(DataError, match="none of the first 2 samples got a reward"):
        NoRewardGuard().check(NONE)


def test_three_batches_in_a_row_without_any_reward_stop_it_and_fewer_do_not():
    guard = NoRewardGuard()
    for valid in (SOME, NONE, NONE, SOME, NONE, NONE):
        guard.check(valid)
    with pytest.raises(DataError, match="none of the last 3 batches of 2 samples got a reward"):
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
    with pytest.raises(DataError, match=r"^a.parquet row 7: no reward function for data_source='nobody/knows'; there "):
        check_data_sources(Data(), built_in)
    check_data_sources(Data(), own)
    check_data_sources([{"data_source": "nobody/knows"}], built_in)  # a dataset of the user's: not asked
