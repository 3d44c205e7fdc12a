"""What a run is compared with before it goes on from a checkpoint."""

import logging

import pytest

from hybridrl.config import PPOConfig, SFTConfig, from_dict, to_yaml
from hybridrl.errors import CheckpointError
from hybridrl.trainer.checkpoint.compatibility import (
    IDENTITY,
    NUM_SAMPLES,
    SAMPLE_BYTES,
    WHOLE_BYTES,
    changed_settings,
    compare_run,
    fingerprint,
    identity,
)
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
    write_run_state(str(directory), {"global_steps": 1, IDENTITY: identity(config)}, config_yaml=to_yaml(config))
    return str(directory)


def test_a_run_that_is_the_same_says_nothing(make, tmp_path, caplog):
    path = save(tmp_path / "one", make())
    (tmp_path / "model" / "README.md").write_text("other words")
    with caplog.at_level(logging.INFO):
        compare_run(path, make(trainer={"resume_mode": "resume_path", "resume_from_path": path}))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("file", "key"),
    [("train.parquet", "data.train_files"), ("model/model.safetensors", "actor_rollout_ref.model.path")],
)
def test_other_data_and_another_model_are_refused(make, tmp_path, file, key):
    path = save(tmp_path / "one", make())
    (tmp_path / file).write_text("others")
    with pytest.raises(CheckpointError, match=f"another {key}: .*trainer.experiment_name"):
        compare_run(path, make())


def test_a_model_that_was_moved_is_the_same(make, tmp_path, caplog):
    path = save(tmp_path / "one", make())
    (tmp_path / "model").rename(tmp_path / "moved")
    with caplog.at_level(logging.INFO):
        compare_run(path, make(actor_rollout_ref={"model": {"path": str(tmp_path / "moved")}}))
    assert f"actor_rollout_ref.model.path {tmp_path}/model -> {tmp_path}/moved" in caplog.text


def test_changed_settings_are_told(make, tmp_path, caplog):
    path = save(tmp_path / "one", make(custom_reward_function={"kwargs": {"bonus": 1}}))
    now = make(algorithm={"gamma": 0.9}, trainer={"total_training_steps": 7})
    assert set(changed_settings(path, now)) == {
        "algorithm.gamma 1 -> 0.9",
        "trainer.total_training_steps null -> 7",
        "custom_reward_function.kwargs (none) -> {}",
        "custom_reward_function.kwargs.bonus 1 -> (none)",
    }
    with caplog.at_level(logging.INFO):
        compare_run(path, now)
    assert "settings that differ from the checkpoint: " in caplog.text and "algorithm.gamma 1 -> 0.9" in caplog.text


def test_a_large_file_is_looked_at_in_places_and_at_its_end(tmp_path):
    path = tmp_path / "large.parquet"
    with open(path, "wb") as f:
        f.truncate(WHOLE_BYTES + NUM_SAMPLES * SAMPLE_BYTES)
    before = fingerprint([str(path)])
    with open(path, "r+b") as f:
        f.seek(-1, 2)
        f.write(b"x")
    assert fingerprint([str(path)]) != before


def test_what_is_not_on_this_machine_counts_by_its_name():
    assert fingerprint(["Qwen/Qwen2.5-0.5B"]) != fingerprint(["Qwen/Qwen2.5-1.5B"])
    sft = from_dict(SFTConfig, {"model": {"path": "Qwen/Qwen2.5-0.5B"}})
    assert identity(sft)["model.path"] == fingerprint(["Qwen/Qwen2.5-0.5B"])
