"""A run's directory, the checkpoints in it, and warnings about disabled outputs and small batches."""

import os

import pytest

from hybridrl.config import PPOConfig, SFTConfig, from_dict
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.system.secrets import HIDDEN
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.run.setup import (
    newest_checkpoint_of_run,
    open_tracking,
    prepared_run_directory,
    run_stages,
    warn_about_disabled_outputs,
    warn_about_small_batches,
)


def test_an_error_names_the_step_of_the_run_and_not_of_this_process():
    def fail(ctx):
        if ctx.total_step == 4:
            raise ValueError("planted")

    with pytest.raises(ValueError) as caught:
        run_stages([fail], max_step=9, first_step=26)
    assert caught.value.__notes__ == ["in stage 'fail' of step 30"]


@pytest.fixture
def used_directory(tmp_path):
    """Return a directory with a checkpoint of step 13."""
    CheckpointStore(str(tmp_path)).commit(13, write_checkpoint)
    return str(tmp_path)


def write_checkpoint(directory):
    for name in (".metadata", "__0_0.distcp"):
        with open(f"{directory}/{name}", "w", encoding="utf-8") as file:
            file.write("weights")


def prepare(**settings):
    with prepared_run_directory(TrainerConfig(**settings)) as directory:
        return directory


@pytest.mark.parametrize("save_freq", [-1, 1])
def test_a_new_run_is_rejected_in_the_directory_of_one_with_checkpoints(used_directory, save_freq):
    with pytest.raises(
        ConfigError,
        match="global_step_13 is of an earlier run.*trainer.experiment_name or trainer.default_local_dir",
    ):
        prepare(default_local_dir=used_directory, resume_mode="disable", save_freq=save_freq)
    assert prepare(default_local_dir=used_directory, save_freq=save_freq) == used_directory


def test_a_new_run_may_start_in_the_directory_of_one_without_checkpoints(tmp_path):
    (tmp_path / "global_step_4.partial").mkdir()
    assert prepare(default_local_dir=str(tmp_path), resume_mode="disable") == str(tmp_path)


def test_the_error_of_an_earlier_attempt_is_removed_once_the_next_one_may_start(used_directory, tmp_path):
    (tmp_path / "error.log").write_text("Traceback")
    with pytest.raises(ConfigError):
        prepare(default_local_dir=used_directory, resume_mode="disable")
    assert (tmp_path / "error.log").exists()
    prepare(default_local_dir=used_directory)
    assert not (tmp_path / "error.log").exists()


def test_a_directory_is_prepared_for_one_run_at_a_time(used_directory):
    with (
        prepared_run_directory(TrainerConfig(default_local_dir=used_directory)),
        pytest.raises(ConfigError, match=f"{used_directory} is in use .*{os.getpid()}"),
    ):
        prepare(default_local_dir=used_directory)
    assert prepare(default_local_dir=used_directory) == used_directory


def test_a_damaged_checkpoint_is_noticed_before_anything_starts(used_directory, tmp_path):
    (tmp_path / "global_step_13/.metadata").write_text("Weights")
    with pytest.raises(CheckpointError, match="global_step_13 is damaged"):
        prepare(default_local_dir=used_directory)


@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_a_directory_that_cannot_be_written_is_rejected_by_name(tmp_path, key):
    (tmp_path / "file").write_text("")
    settings = {"default_local_dir": str(tmp_path / "run"), key: str(tmp_path / "file/inside")}
    with pytest.raises(ConfigError, match=f"trainer.{key}=.*/file/inside: cannot be written .Not a directory.; choose"):
        prepare(**settings)


def test_a_full_disk_is_noticed_before_anything_starts(tmp_path, full_disk):
    with full_disk(), pytest.raises(ConfigError, match="trainer.default_local_dir=.*cannot be written"):
        prepare(default_local_dir=str(tmp_path))


def test_a_checkpoint_of_another_run_is_not_returned(used_directory, tmp_path):
    elsewhere = {"resume_mode": "resume_path", "resume_from_path": "/elsewhere/global_step_2"}
    assert newest_checkpoint_of_run(TrainerConfig(default_local_dir=used_directory, **elsewhere)) is None
    assert newest_checkpoint_of_run(TrainerConfig(default_local_dir=used_directory, save_freq=1, **elsewhere)) == str(
        tmp_path / "global_step_13"
    )
    assert newest_checkpoint_of_run(TrainerConfig(default_local_dir=used_directory)) == str(
        tmp_path / "global_step_13"
    )  # it resumes from it
    assert newest_checkpoint_of_run(TrainerConfig(default_local_dir=str(tmp_path / "new"), save_freq=1)) is None


@pytest.mark.parametrize(
    ("trainer", "val_files", "keys"),
    [
        ({}, ["v.parquet"], ["trainer.save_freq=-1", "trainer.test_freq=-1"]),
        ({}, [], ["trainer.save_freq=-1"]),
        ({"val_only": True}, ["v.parquet"], []),
        ({"save_freq": 5, "test_freq": 5}, ["v.parquet"], []),
    ],
)
def test_disabled_outputs_are_logged_at_the_start(caplog, trainer, val_files, keys):
    warn_about_disabled_outputs(from_dict(PPOConfig, {"trainer": trainer, "data": {"val_files": val_files}}))
    assert [record.message.partition(":")[0] for record in caplog.records] == keys


def test_no_logger_gets_a_secret(tmp_path):
    kwargs = {"judges": [{"hf_token": "sk-123"}], "PASSWORD": "sk-123", "tokens": 3}
    trainer = {"default_local_dir": str(tmp_path), "logger": [f"{__file__}:RememberingTracker"]}
    config = from_dict(PPOConfig, {"trainer": trainer, "custom_reward_function": {"kwargs": kwargs}})
    with open_tracking(config, start_step=0, total_steps=1) as tracking:
        [tracker] = tracking._trackers
    found = tracker.run.config["custom_reward_function"]["kwargs"]
    assert found == {"judges": [{"hf_token": HIDDEN}], "PASSWORD": HIDDEN, "tokens": 3}


class RememberingTracker:
    """A logger of a user's that keeps what it is told about the run."""

    def __init__(self, run):
        self.run = run

    def log(self, metrics, step):
        """Log nothing."""

    def close(self):
        """Close nothing."""


def test_batches_smaller_than_configured_are_logged(caplog):
    config = from_dict(
        PPOConfig, {"data": {"train_batch_size": 16}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 7}}}
    )
    warn_about_small_batches(config, num_rows=1000)
    assert caplog.messages == [
        "actor_rollout_ref.actor.ppo_mini_batch_size=7: the last optimizer step of every batch has only 2 prompts"
    ]
    caplog.clear()
    warn_about_small_batches(from_dict(SFTConfig, {"data": {"train_batch_size": 16}}), num_rows=5)
    assert caplog.messages == ["data.train_batch_size=16: the training data has 5 rows, so every step has only those"]
    caplog.clear()
    warn_about_small_batches(config, num_rows=7)
    assert caplog.messages == ["data.train_batch_size=16: the training data has 7 rows, so every step has only those"]
