"""Every registered estimator and policy loss takes a real training step, and the update does not depend on its cut."""

import pytest

from hybridrl.algos import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tests.support.end_to_end.runs import largest_difference, train, weights

SHORT = {
    "trainer__total_training_steps": 1,
    "trainer__val_before_train": False,
    "trainer__test_freq": -1,
    "actor_rollout_ref__actor__ppo_epochs": 2,  # in the second one the ratio is not 1
}
ESTIMATORS = {"gdpo": {"algorithm__gdpo_reward_keys": "[score]"}}
LOSS = "actor_rollout_ref__actor__policy_loss__"
SETTINGS = {
    "dro": {f"{LOSS}dro_beta": 0.5},
    "bypass_mode": {
        "algorithm__rollout_correction__bypass_mode": True,
        "algorithm__rollout_correction__loss_type": "reinforce",
        "algorithm__rollout_correction__rollout_is": "sequence",
        "algorithm__rollout_correction__rollout_rs": "[seq_max_k3,token_k1]",
        "algorithm__rollout_correction__rollout_rs_threshold": "[1e-4,1.02]",  # rejects some tokens in the second epoch
    },
    "clip_cov": {f"{LOSS}clip_cov_ratio": 0.2, f"{LOSS}clip_cov_lb": 0, f"{LOSS}clip_cov_ub": 100},
    "kl_cov": {f"{LOSS}kl_cov_ratio": 0.2, f"{LOSS}ppo_kl_coef": 1},
}


@pytest.mark.parametrize("estimator", [name for name, e in ADVANTAGE_ESTIMATORS.items() if not e.needs_critic])
def test_an_estimator_trains(tmp_path, tiny_qwen2, estimator):
    more = ESTIMATORS.get(estimator, {})
    [row] = train(tmp_path, tiny_qwen2, algorithm__adv_estimator=estimator, trainer__save_freq=-1, **SHORT, **more)
    assert 0 < row["actor/grad_norm"] < 100


def test_vapo_trains_policy_and_critic_on_normalised_rewards(tmp_path, tiny_qwen2):
    [row] = train(tmp_path, tiny_qwen2, algorithm__adv_estimator="vapo", algorithm__normalize_reward="true", **SHORT)
    assert 0 < row["actor/grad_norm"] < 100 and row["critic/grad_norm"] > 0
    assert row["reward/running_mean"] == pytest.approx(row["critic/score/mean"])
    assert row["critic/rewards/mean"] == pytest.approx(0, abs=1e-5)


def test_gdpo_trains_on_the_rewards_that_a_function_returns(tmp_path, tiny_qwen2):
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    digits = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))\n"
        "    return {'score': digits, 'short': -len(solution_str), 'digits': digits}\n"
    )
    more = {
        "algorithm__adv_estimator": "gdpo",
        "algorithm__gdpo_reward_keys": "[digits,short]",
        "algorithm__gdpo_reward_weights": "[1.0,0.5]",
        "custom_reward_function__path": reward,
    }
    [row] = train(tmp_path, tiny_qwen2, trainer__save_freq=-1, **SHORT, **more)
    assert 0 < row["actor/grad_norm"] < 100
    assert row["reward_extra/digits/mean"] == pytest.approx(row["critic/score/mean"])
    assert row["reward_extra/short/mean"] < 0


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
def test_a_policy_loss_trains_and_micro_batches_do_not_change_the_update(tmp_path, tiny_qwen2, loss):
    found = []
    for rows in (2, 6):
        changes = SHORT | SETTINGS.get(loss, {}) | {f"{LOSS}loss_mode": loss}
        changes["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = rows
        [row] = train(tmp_path / str(rows), tiny_qwen2, **changes)
        assert 0 < row["actor/grad_norm"] < 100
        found.append(weights(tmp_path / str(rows) / "run/global_step_1", tmp_path / f"hf{rows}"))
    assert largest_difference(*found) < 1e-5
