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
SETTINGS = {"dro": {"actor_rollout_ref__actor__policy_loss__dro_beta": 0.5}}


@pytest.mark.parametrize("estimator", [name for name, e in ADVANTAGE_ESTIMATORS.items() if not e.needs_critic])
def test_an_estimator_trains(tmp_path, tiny_qwen2, estimator):
    [row] = train(tmp_path, tiny_qwen2, algorithm__adv_estimator=estimator, trainer__save_freq=-1, **SHORT)
    assert 0 < row["actor/grad_norm"] < 100


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
def test_a_policy_loss_trains_and_micro_batches_do_not_change_the_update(tmp_path, tiny_qwen2, loss):
    found = []
    for rows in (2, 6):
        changes = SHORT | SETTINGS.get(loss, {}) | {"actor_rollout_ref__actor__policy_loss__loss_mode": loss}
        changes["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = rows
        [row] = train(tmp_path / str(rows), tiny_qwen2, **changes)
        assert 0 < row["actor/grad_norm"] < 100
        found.append(weights(tmp_path / str(rows) / "run/global_step_1", tmp_path / f"hf{rows}"))
    assert largest_difference(*found) < 1e-5
