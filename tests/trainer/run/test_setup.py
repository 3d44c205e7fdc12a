"""A run's directory: whose it is, whose checkpoints are in it, and what will not be there at the end."""

import pytest

from hybridrl.config import PPOConfig, SFTConfig, from_dict
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import ConfigError
from hybridrl.trainer.run.setup import claim_directory, own_checkpoint, tell_what_is_left_out, tell_what_is_smaller


@pytest.fixture
def used(tmp_path):
    """A directory with a checkpoint of step 13."""
    (tmp_path / "global_step_13").mkdir()
    return str(tmp_path)


@pytest.mark.parametrize("save_freq", [-1, 1])
def test_a_new_run_does_not_begin_in_the_directory_of_one_that_has_checkpoints(used, save_freq):
    with pytest.raises(
        ConfigError,
        match="global_step_13 is of an earlier run.*set trainer.experiment_name or trainer.default_local_dir",
    ):
        claim_directory(TrainerConfig(default_local_dir=used, resume_mode="disable", save_freq=save_freq))
    assert claim_directory(TrainerConfig(default_local_dir=used, save_freq=save_freq)) == used


def test_a_new_run_may_begin_in_the_directory_of_one_that_has_none(tmp_path):
    (tmp_path / "global_step_4.partial").mkdir()
    assert claim_directory(TrainerConfig(default_local_dir=str(tmp_path), resume_mode="disable")) == str(tmp_path)


def test_a_checkpoint_of_another_run_is_not_this_ones(used, tmp_path):
    elsewhere = {"resume_mode": "resume_path", "resume_from_path": "/elsewhere/global_step_2"}
    assert own_checkpoint(TrainerConfig(default_local_dir=used, **elsewhere)) is None
    assert own_checkpoint(TrainerConfig(default_local_dir=used, save_freq=1, **elsewhere)) == str(
        tmp_path / "global_step_13"
    )
    assert own_checkpoint(TrainerConfig(default_local_dir=used)) == str(
        tmp_path / "global_step_13"
    )  # it goes on from it
    assert own_checkpoint(TrainerConfig(default_local_dir=str(tmp_path / "new"), save_freq=1)) is None


@pytest.mark.parametrize(
    ("trainer", "val_files", "keys"),
    [
        ({}, ["v.parquet"], ["trainer.save_freq=-1", "trainer.test_freq=-1"]),
        ({}, [], ["trainer.save_freq=-1"]),
        ({"val_only": True}, ["v.parquet"], []),
        ({"save_freq": 5, "test_freq": 5}, ["v.parquet"], []),
    ],
)
def test_what_will_be_missed_at_the_end_is_said_at_the_start(caplog, trainer, val_files, keys):
    tell_what_is_left_out(from_dict(PPOConfig, {"trainer": trainer, "data": {"val_files": val_files}}))
    assert [record.message.partition(":")[0] for record in caplog.records] == keys


def test_batches_that_will_be_smaller_than_asked_for_are_told(caplog):
    config = from_dict(
        PPOConfig, {"data": {"train_batch_size": 16}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 7}}}
    )
    tell_what_is_smaller(config, num_rows=1000)
    assert caplog.messages == [
        "actor_rollout_ref.actor.ppo_mini_batch_size=7: the last optimizer step of every batch has only 2 prompts"
    ]
    caplog.clear()
    tell_what_is_smaller(from_dict(SFTConfig, {"data": {"train_batch_size": 16}}), num_rows=5)
    assert caplog.messages == ["data.train_batch_size=16: the training data has 5 rows, so every step has only those"]
    caplog.clear()
    tell_what_is_smaller(config, num_rows=7)
    assert caplog.messages == ["data.train_batch_size=16: the training data has 7 rows, so every step has only those"]
