"""Conversations of an agent as rows of a batch: their tokens, scores and places in mini-batches."""

import numpy as np
import pytest
import torch

from hybridrl.config import PPOConfig, load_config
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop.base import AgentLoopOutput
from hybridrl.trainer.ppo.sampling.branches import add_branch_rows
from hybridrl.trainer.ppo.update_batch import select_training_rows
from hybridrl.trainer.roles import Role

PAD = 0
BRANCHES = [
    AgentLoopOutput([1, 2, 3], [4, 5, 6, 7], [0, 1, 1, 0], [0.0, -0.5, -0.25, 0.0], 4, 2, [-1, 2, 3, -1]),
    AgentLoopOutput([9], [8], [1], [-1.0], 2, 3, reward=-2.0),
]


def samples(branches: list[list[AgentLoopOutput]], *, valid: tuple[bool, ...] = (True, True)) -> DataProto:
    """Return two scored samples, with prompts of two tokens and responses of up to four."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    prompts, responses = torch.tensor([[0, 11], [12, 13]]), torch.tensor([[21, 22, 0, 0], [31, 32, 33, 0]])
    attention = torch.cat([torch.tensor([[0, 1], [1, 1]]), mask], 1)
    tensors = {
        **{"prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1)},
        **{"attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)},
        **{"response_mask": mask, "rollout_log_probs": -mask.float(), "weights_version": torch.tensor([3, 3])},
        **{"num_turns": torch.tensor([2, 2]), "reward_valid": torch.tensor(valid)},
        "token_level_scores": torch.tensor([[0, 1.5, 0, 0], [0, 0, 2.5, 0]]),
    }
    column = np.fromiter(([one.as_branch() for one in own] for own in branches), dtype=object, count=2)
    others = {"branches": column, "uid": np.array(["a", "b"], dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


def test_a_branch_is_a_row_with_its_own_tokens_and_the_other_columns_of_its_sample():
    found = add_branch_rows(samples([[], BRANCHES]), pad_token_id=PAD)
    columns, others = found.batch, found.non_tensor_batch
    assert columns["episode"].tolist() == [0, 1, 1, 1] and others["uid"].tolist() == ["a", "b", "b", "b"]
    assert columns["prompts"].tolist() == [[0, 0, 11], [0, 12, 13], [1, 2, 3], [0, 0, 9]]
    assert columns["responses"].tolist()[2:] == [[4, 5, 6, 7], [8, 0, 0, 0]]
    assert columns["response_mask"].tolist()[2:] == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert columns["attention_mask"].tolist()[2:] == [[1] * 7, [0, 0, 1, 1, 0, 0, 0]]
    assert columns["position_ids"].tolist()[2:] == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4]]
    assert columns["rollout_log_probs"].tolist()[2:] == [[0, -0.5, -0.25, 0], [-1, 0, 0, 0]]
    assert columns["weights_version"].tolist() == [3, 3, 2, 3] and columns["num_turns"].tolist() == [2, 2, 4, 2]
    # The sample's score on the last trained token, and a score of its own.
    assert columns["token_level_scores"].tolist()[2:] == [[0, 0, 2.5, 0], [-2, 0, 0, 0]]
    assert torch.equal(columns["input_ids"], torch.cat([columns["prompts"], columns["responses"]], 1))
    assert "branches" not in others


def test_a_sample_without_a_valid_reward_gets_no_further_rows():
    found = add_branch_rows(samples([BRANCHES, BRANCHES[:1]], valid=(False, True)), pad_token_id=PAD)
    assert found.batch["episode"].tolist() == [0, 1, 1]


def test_without_branches_the_samples_stay_as_they_are():
    batch = samples([[], []])
    found = add_branch_rows(batch, pad_token_id=PAD)
    assert all(torch.equal(found.batch[name], column) for name, column in batch.batch.items()) and len(found) == 2


@pytest.mark.parametrize("draws", [False, True])
def test_a_mini_batch_has_whole_episodes(draws):
    words = [f"algorithm.use_pf_ppo={str(draws).lower()}", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    config = load_config(PPOConfig, words, program="p", config_name="ppo_trainer")
    batch = add_branch_rows(samples([BRANCHES[:1], BRANCHES]), pad_token_id=PAD)
    data = select_training_rows(batch, ["responses", "response_mask"], config, role=Role.Actor, step=1)
    episodes, first = data.batch["episode"], data.batch["responses"][:, 0]
    assert data.meta_info["update_plan"].mini_batch_size == 1
    if not draws:
        assert episodes.tolist() == [0, 1, 0, 1, 1] and first.tolist() == [21, 31, 4, 4, 8]
        return
    rows_of = {21: [21, 4], 31: [31, 4, 8]}  # drawn as a whole, and numbered by draw
    for episode in range(2):
        own = first[episodes == episode].tolist()
        assert own == rows_of[own[0]]
