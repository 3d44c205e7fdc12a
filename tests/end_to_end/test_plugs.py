"""User-defined formulas, in every process that needs them."""

import pytest

from hybridrl import main_ppo
from hybridrl.algos.advantages import ADVANTAGE_ESTIMATORS
from hybridrl.algos.policy_losses import POLICY_LOSSES, register_policy_loss, vanilla
from tests.support.end_to_end.runs import settings, train

CODE = """
from hybridrl.algos import PolicyLoss, register_adv_est, register_policy_loss

@register_policy_loss("nothing")
def nothing(log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, *, clip_low, clip_high, clip_c):
    never = response_mask_BT.bool() & False
    return PolicyLoss(log_probs_BT * 0, never, never, never.float())

@register_adv_est("threes")
def threes(token_level_rewards_BT, response_mask_BT):
    return response_mask_BT * 3.0, response_mask_BT * 1.0
"""
SHORT = {
    "trainer__total_training_steps": 1,
    "trainer__save_freq": -1,
    "trainer__test_freq": -1,
    "trainer__val_before_train": False,
}


@pytest.fixture(autouse=True)
def registries_as_they_were():
    before = [(registry, dict(registry)) for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


def test_on_ray_files_of_formulas_work_and_external_lib_runs_in_every_process(tmp_path, tiny_qwen2, ray_cluster):
    (tmp_path / "formulas.py").write_text(CODE)
    (tmp_path / "ours.py").write_text(
        f"import os, pathlib\n(pathlib.Path({str(tmp_path)!r}) / f'seen_{{os.getpid()}}').touch()\n"
    )
    (row,) = train(
        tmp_path,
        tiny_qwen2,
        algorithm__path=tmp_path / "formulas.py",
        algorithm__adv_estimator="threes",
        actor_rollout_ref__actor__policy_loss__loss_mode="nothing",
        actor_rollout_ref__model__external_lib=tmp_path / "ours.py",
        trainer__backend="ray",
        **SHORT,
    )
    assert len(list(tmp_path.glob("seen_*"))) == 2  # the driver and its one worker
    assert row["critic/advantages/mean"] == 3 and row["actor/pg_loss"] == 0 and row["actor/grad_norm"] == 0


def test_a_loss_registered_only_in_the_driver_is_refused_before_generation(tmp_path, tiny_qwen2, ray_cluster, capsys):
    register_policy_loss("drivers_own")(lambda *arguments, **settings: vanilla(*arguments, **settings))
    changes = {"actor_rollout_ref__actor__policy_loss__loss_mode": "drivers_own", "trainer__backend": "ray"}
    rollouts = tmp_path / "rollouts"
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **SHORT, **changes, trainer__rollout_data_dir=rollouts)) == 2
    assert "a file in algorithm.path registers" in capsys.readouterr().err
    assert not list(rollouts.iterdir())


@pytest.mark.parametrize("key", ["algorithm.path", "actor_rollout_ref.model.external_lib"])
def test_the_error_for_a_missing_file_names_its_key(tmp_path, tiny_qwen2, capsys, key):
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), f"{key}=nowhere.py"]) == 2
    assert f"{key}=nowhere.py: no file nowhere.py" in capsys.readouterr().err
