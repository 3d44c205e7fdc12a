"""Contents of an export, and the directories and machines that it can be made on."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from hybridrl.cli import export_checkpoint
from hybridrl.errors import ConfigError
from hybridrl.trainer.checkpoint.store import MANIFEST, CheckpointStore
from tests.support.end_to_end.runs import largest_difference, train, weights

SHORT = {"trainer__total_training_steps": 1, "trainer__val_before_train": False, "trainer__test_freq": -1}


def test_an_export_has_the_settings_that_the_model_was_trained_with(tmp_path, tiny_qwen2):
    train(tmp_path, tiny_qwen2, actor_rollout_ref__model__override_config="{rms_norm_eps:0.5}", **SHORT)
    export_checkpoint(str(tmp_path / "run/global_step_1"), str(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf/config.json").read_text())["rms_norm_eps"] == 0.5
    assert json.loads((tiny_qwen2 / "config.json").read_text())["rms_norm_eps"] != 0.5
    assert (tmp_path / "hf/model.safetensors").stat().st_mode & 0o777 == 0o644  # as readable as the configuration


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory, tiny_qwen2) -> Path:
    """Start a run with a model path relative to its directory; return that directory."""
    folder = tmp_path_factory.mktemp("run_directory")
    shutil.copytree(tiny_qwen2, folder / "models/base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(folder, "models/base", **SHORT)
    return folder


def test_an_export_finds_the_model_from_any_directory(run_directory, tmp_path):
    assert weights(run_directory / "run/global_step_1", tmp_path / "hf")


def test_a_run_on_gpus_is_exported_without_one(run_directory, tmp_path):
    committed = run_directory / "run/global_step_1"

    def as_on_gpus(directory: str) -> None:
        shutil.copytree(committed, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        path = Path(directory) / "config.yaml"
        settings = yaml.safe_load(path.read_text())
        settings["trainer"]["device"] = "cuda"
        path.write_text(yaml.dump(settings))

    on_gpus = CheckpointStore(str(tmp_path / "gpus")).commit(1, as_on_gpus)
    assert largest_difference(weights(Path(on_gpus), tmp_path / "hf"), weights(committed, tmp_path / "hf_cpu")) == 0


def test_a_checkpoint_does_not_decide_that_its_models_code_is_trusted(run_directory, tmp_path):
    committed = run_directory / "run/global_step_1"

    def trusting(directory: str) -> None:
        shutil.copytree(committed, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        path = Path(directory) / "config.yaml"
        settings = yaml.safe_load(path.read_text())
        settings["actor_rollout_ref"]["model"]["trust_remote_code"] = True
        path.write_text(yaml.dump(settings))

    checkpoint = CheckpointStore(str(tmp_path / "foreign")).commit(1, trusting)
    with pytest.raises(ConfigError, match="names Python code .*trust_remote_code=true.*--trust-remote-code"):
        export_checkpoint(checkpoint, str(tmp_path / "hf"))
    export_checkpoint(checkpoint, str(tmp_path / "hf"), trust_remote_code=True)
