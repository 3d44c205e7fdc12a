"""What the update gets: rows, the mask that is left of them, and the tokens that clip_cov and kl_cov act on."""

import logging

import numpy as np
import pytest
import torch

from hybridrl.config import PPOConfig, load_config
from hybridrl.config.schema.ppo import SelectSamplesConfig
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.update_batch import add_covariance_selection, choose_samples, has_tokens, select_training_rows
from hybridrl.trainer.roles import Role

LOSS = "actor_rollout_ref.actor.policy_loss"


def config_of(*words: str) -> PPOConfig:
    return load_config(PPOConfig, list(words), program="p", config_name="ppo_trainer")


def batch_of(rows: int = 12, prompt: int = 4, length: int = 6) -> DataProto:
    torch.manual_seed(0)
    lengths = torch.arange(rows) % length + 1
    mask = (torch.arange(length) < lengths[:, None]).long()
    tensors = {
        "input_ids": torch.randint(1, 90, (rows, prompt + length)),
        "attention_mask": torch.cat([torch.ones(rows, prompt, dtype=torch.long), mask], dim=1),
        "response_mask": mask,
        "old_log_probs": -torch.rand(rows, length) * 5,
        "advantages": torch.randn(rows, length) * 3,
        "rollout_rs_mask": mask * (torch.arange(rows) % 2)[:, None],
        "reward_valid": torch.ones(rows, dtype=torch.bool),
    }
    return DataProto.from_dict(tensors=tensors)


def test_rejected_tokens_leave_the_mask_of_the_update_and_not_that_of_the_batch():
    batch = batch_of()
    before, columns = batch.batch["response_mask"].clone(), ["response_mask", "rollout_rs_mask"]
    data = select_training_rows(batch, columns, config_of(), role=Role.Actor, step=1)
    assert torch.equal(data.batch["response_mask"], batch.batch["rollout_rs_mask"])
    assert "rollout_rs_mask" not in data.batch.keys() and len(data) == len(batch)
    assert torch.equal(batch.batch["response_mask"], before)
    whole = select_training_rows(batch, ["response_mask"], config_of(), role=Role.Critic, step=1)
    assert torch.equal(whole.batch["response_mask"], before)


def test_an_update_without_a_token_is_reported(caplog):
    batch = batch_of()
    assert has_tokens(batch, step=3) and not caplog.text
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    with caplog.at_level(logging.WARNING):
        assert not has_tokens(batch, step=3)
    assert "staleness left no token of 12 responses" in caplog.text


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_selection_belongs_to_the_tokens_whatever_the_order_of_rows(loss):
    settings = [
        f"{LOSS}.loss_mode={loss}",
        f"{LOSS}.{loss}_ratio=0.2",
        f"{LOSS}.clip_cov_lb=0.1",
        f"{LOSS}.clip_cov_ub=9",
    ]
    config, batch, order = config_of(*settings), batch_of(), torch.randperm(12)
    other = DataProto.from_dict(tensors={name: column[order] for name, column in batch.batch.items()})
    for data in (batch, other):
        add_covariance_selection(data, config, step=5)
    selected = batch.batch["cov_selected"]
    assert 0 < selected.sum() <= 0.2 * batch.batch["response_mask"].sum()
    assert torch.equal(other.batch["cov_selected"], selected[order])
    again = batch_of()
    add_covariance_selection(again, config, step=6)
    assert torch.equal(again.batch["cov_selected"], selected) == (loss == "kl_cov")


def test_other_losses_get_no_selection():
    batch = batch_of()
    add_covariance_selection(batch, config_of(), step=1)
    assert "cov_selected" not in batch.batch.keys()


def scored_batch() -> DataProto:
    batch = batch_of()
    scores = torch.tensor([0.0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 3])
    batch.batch["token_level_scores"] = torch.zeros(12, 6).index_fill(1, torch.tensor([2]), 1) * scores[:, None]
    batch.batch["reward_valid"][11] = False
    batch.batch["row"] = torch.arange(12)
    return batch


def test_pf_ppo_draws_the_rows_of_both_updates_by_their_scores():
    batch, config = scored_batch(), config_of("algorithm.use_pf_ppo=true")
    drawn = {
        (role, step): select_training_rows(batch, ["response_mask", "row"], config, role=role, step=step)
        for role in (Role.Actor, Role.Critic)
        for step in (1, 2)
    }
    rows = {key: data.batch["row"].tolist() for key, data in drawn.items()}
    # Weights 1, 4 and 1e-8; row 11 has no valid reward. As many rows as are valid.
    assert all(len(found) == 11 and {*found} <= {1, 4} for found in rows.values())
    assert rows[Role.Actor, 1] == rows[Role.Critic, 1] != rows[Role.Actor, 2]
    one_seed = config_of("algorithm.use_pf_ppo=true", "trainer.seed=9")
    other = select_training_rows(batch, ["response_mask", "row"], one_seed, role=Role.Actor, step=1)
    assert other.batch["row"].tolist() != rows[Role.Actor, 1]


def test_the_likelihood_loss_is_the_mean_over_tokens_of_right_responses():
    batch, config = scored_batch(), config_of("actor_rollout_ref.actor.positive_nll_coef=0.1")
    data = select_training_rows(batch, ["response_mask"], config, role=Role.Actor, step=1)
    weights, lengths = data.batch["nll_weights"], data.batch["response_mask"].sum(-1)
    # Rows 1 and 4, of 2 and 5 tokens, are right; the eleven rows have 36 tokens.
    assert weights.nonzero()[:, 0].tolist() == [1, 4] and weights[1].item() == pytest.approx(36 / 7)
    assert (weights * lengths).sum().item() / lengths.sum().item() == pytest.approx(1)
    assert "nll_weights" not in select_training_rows(batch, ["row"], config, role=Role.Critic, step=1).batch.keys()


def test_a_mini_batch_has_as_many_rows_of_each_prompt_as_are_selected():
    words = ["actor_rollout_ref.rollout.n=6", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    plans = [
        select_training_rows(batch_of(), ["response_mask"], config_of(*words, *more), role=Role.Actor, step=1)
        for more in ([], ["algorithm.select_samples.k=3"])
    ]
    assert [data.meta_info["update_plan"].mini_batch_size for data in plans] == [12, 6]


def scored(scores: list[float]) -> DataProto:
    values = torch.tensor(scores)
    tensors = {
        "token_level_scores": torch.stack([values.nan_to_num() / 2] * 2, dim=1),
        "reward_valid": values.isfinite(),
        "row": torch.arange(len(scores)),
    }
    return DataProto.from_dict(tensors, {"uid": np.array(["a"] * 4 + ["b"] * 4, dtype=object)})


def test_the_chosen_rows_of_each_group_stay_in_order():
    batch = scored([0, 1, 1, 1, 3, float("nan"), 1, 2])
    chosen, metrics = choose_samples(batch, SelectSamplesConfig(k=2), n=4, seed=0)
    assert chosen.batch["row"].tolist() == [0, 1, 4, 6] and chosen.non_tensor_batch["uid"].tolist() == list("aabb")
    best, _ = choose_samples(batch, SelectSamplesConfig(k=3, method="max_reward"), n=4, seed=0)
    assert best.batch["row"].tolist() == [1, 2, 3, 4, 6, 7]
    # Over the seven valid samples, before the choice.
    assert metrics["training/select_samples/seq_reward_mean"] == pytest.approx(9 / 7)
    assert metrics["training/select_samples/left_out_samples"] == 4
