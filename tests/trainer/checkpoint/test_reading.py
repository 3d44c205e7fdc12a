"""Which checkpoints a run may resume from, and which changed settings are logged."""

import logging

import pytest

from hybridrl.config import PPOConfig, SFTConfig, from_dict, to_yaml
from hybridrl.errors import CheckpointError
from hybridrl.trainer.checkpoint.fingerprint import (
    FINGERPRINT_KEY,
    MAX_FULL_HASH_BYTES,
    NUM_SAMPLES,
    SAMPLE_BYTES,
    hash_files,
    run_fingerprint,
)
from hybridrl.trainer.checkpoint.reading import changed_settings, check_compatible, read_complete_state
from hybridrl.trainer.checkpoint.store import write_run_state


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a config over one data file and one model directory."""
    (tmp_path / "train.parquet").write_text("rows")
    (tmp_path / "model").mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "weights", "README.md": "words"}.items():
        (tmp_path / "model" / name).write_text(text)

    def config(**sections) -> PPOConfig:
        basis = {"data": {"train_files": [str(tmp_path / "train.parquet")]}}
        policy = {"model": {"path": str(tmp_path / "model")}}
        return from_dict(PPOConfig, basis | {"actor_rollout_ref": policy} | sections)

    return config


def save(directory, config) -> str:
    directory.mkdir(exist_ok=True)
    write_run_state(
        str(directory), {"global_steps": 1, FINGERPRINT_KEY: run_fingerprint(config)}, config_yaml=to_yaml(config)
    )
    return str(directory)


def test_an_unchanged_run_logs_nothing(make, tmp_path, caplog):
    path = save(tmp_path / "one", make())
    (tmp_path / "model" / "README.md").write_text("other words")
    with caplog.at_level(logging.INFO):
        check_compatible(path, make(trainer={"resume_mode": "resume_path", "resume_from_path": path}))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("file", "key"),
    [("train.parquet", "data.train_files"), ("model/model.safetensors", "actor_rollout_ref.model.path")],
)
def test_other_data_and_another_model_are_rejected(make, tmp_path, file, key):
    path = save(tmp_path / "one", make())
    (tmp_path / file).write_text("others")
    with pytest.raises(CheckpointError, match=f"another {key}: .*trainer.experiment_name"):
        check_compatible(path, make())


def test_a_model_that_was_moved_is_the_same(make, tmp_path, caplog):
    path = save(tmp_path / "one", make())
    (tmp_path / "model").rename(tmp_path / "moved")
    with caplog.at_level(logging.INFO):
        check_compatible(path, make(actor_rollout_ref={"model": {"path": str(tmp_path / "moved")}}))
    assert f"actor_rollout_ref.model.path {tmp_path}/model -> {tmp_path}/moved" in caplog.text


def test_changed_settings_are_logged(make, tmp_path, caplog):
    path = save(tmp_path / "one", make(custom_reward_function={"kwargs": {"bonus": 1}}))
    now = make(algorithm={"gamma": 0.9}, trainer={"total_training_steps": 7})
    assert set(changed_settings(path, now)) == {
        "algorithm.gamma 1 -> 0.9",
        "trainer.total_training_steps null -> 7",
        "custom_reward_function.kwargs (none) -> {}",
        "custom_reward_function.kwargs.bonus 1 -> (none)",
    }
    with caplog.at_level(logging.INFO):
        check_compatible(path, now)
    assert "settings that differ from the checkpoint: " in caplog.text and "algorithm.gamma 1 -> 0.9" in caplog.text


def test_a_large_file_is_sampled_and_its_end_counts(tmp_path):
    path = tmp_path / "large.parquet"
    with open(path, "wb") as f:
        f.truncate(MAX_FULL_HASH_BYTES + NUM_SAMPLES * SAMPLE_BYTES)
    before = hash_files([str(path)])
    with open(path, "r+b") as f:
        f.seek(-1, 2)
        f.write(b"x")
    assert hash_files([str(path)]) != before


def test_a_path_that_is_not_on_this_machine_counts_by_its_name():
    assert hash_files(["Qwen/Qwen2.5-0.5B"]) != hash_files(["Qwen/Qwen2.5-1.5B"])
    sft = from_dict(SFTConfig, {"model": {"path": "Qwen/Qwen2.5-0.5B"}})
    assert run_fingerprint(sft)["model.path"] == hash_files(["Qwen/Qwen2.5-0.5B"])


def test_a_checkpoint_without_the_number_of_drawn_batches_has_drawn_the_pending_ones_too(tmp_path):
    old = {"global_steps": 3, "data": {}, "ahead": [{"step": 4}, {"step": 5}]}
    write_run_state(str(tmp_path), old, config_yaml="")
    assert read_complete_state(str(tmp_path))["prompts"] == {"num_drawn": 5}
    write_run_state(str(tmp_path), old | {"prompts": {"num_drawn": 4}}, config_yaml="")
    assert read_complete_state(str(tmp_path))["prompts"] == {"num_drawn": 4}


def test_a_secret_is_in_no_file_and_no_log_and_is_no_change(make, tmp_path, caplog):
    config = make(custom_reward_function={"kwargs": {"api_key": "sk-123", "url": "http://x"}})
    directory = tmp_path / "one"
    directory.mkdir()
    write_run_state(str(directory), {"global_steps": 1}, config_yaml=to_yaml(config, hide_secrets=True))
    assert "sk-123" not in (directory / "config.yaml").read_text()
    kwargs = {"api_key": "sk-456", "url": "http://y"}
    with caplog.at_level(logging.INFO):
        check_compatible(str(directory), make(custom_reward_function={"kwargs": kwargs}))
    assert "http://x -> http://y" in caplog.text and "sk-" not in caplog.text
