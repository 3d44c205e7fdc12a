"""Length rewards, reward components and greedy baselines are added to the rows that they belong to."""

import numpy as np
import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.extra_rewards import add_length_rewards, add_reward_baselines, add_reward_components


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
