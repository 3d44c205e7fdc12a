"""A checkpoint of somebody else: its settings run no code, and damaged ones are one error with the file's name."""

import os

import pytest
import yaml

from hybridrl.config import PPOConfig, from_dict, to_yaml
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.trainer.checkpoint.export_settings import settings_for_export
from hybridrl.trainer.checkpoint.reading import verify_manifest
from hybridrl.trainer.checkpoint.store import CheckpointStore, write_run_state

PLAIN = {"actor_rollout_ref": {"model": {"path": "/models/tiny"}}}


def changed(settings: dict, key: str, value: object) -> dict:
    section, *rest = key.split(".", 1)
    inner = value if not rest else changed(settings.get(section, {}), rest[0], value)
    return settings | {section: inner}


def write_checkpoint(directory, settings: dict) -> str:
    write_run_state(str(directory), {"global_steps": 3}, config_yaml=yaml.safe_dump(settings))
    return str(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.model.external_lib", ["{code}"]),
        ("algorithm.path", ["{code}"]),
        ("actor_rollout_ref.actor.strategy", "{code}:Engine"),
        ("critic.strategy", "{code}:Engine"),
        ("actor_rollout_ref.model.trust_remote_code", True),
    ],
)
def test_code_that_the_settings_name_runs_only_if_the_caller_trusts_it(tmp_path, key, value):
    code, ran = tmp_path / "code.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w').close()\nclass Engine: pass\n")
    value = yaml.safe_load(yaml.safe_dump(value).replace("{code}", str(code)))
    path = write_checkpoint(tmp_path, changed(PLAIN, key, value))
    with pytest.raises(ConfigError, match=rf"names Python code \({key}=.*say --trust-remote-code to run it"):
        settings_for_export(path, trust_remote_code=False)
    assert not ran.exists()
    assert settings_for_export(path, trust_remote_code=True).actor_rollout_ref.model.path == "/models/tiny"


def test_an_export_trusts_no_code_of_a_model_that_the_run_did_not_trust(tmp_path):
    path = write_checkpoint(tmp_path, PLAIN)
    assert settings_for_export(path, trust_remote_code=True).actor_rollout_ref.model.trust_remote_code is False


def test_settings_without_a_model_are_no_checkpoint_of_a_policy(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no actor_rollout_ref.model.path"):
        settings_for_export(write_checkpoint(tmp_path, {}), trust_remote_code=False)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.yaml", b"\xff", "UnicodeDecodeError"),
        ("config.yaml", b"a: [", "ParserError"),
        ("config.yaml", b"[" * 5000, "RecursionError"),
        ("config.yaml", b"!!python/object/apply:os.abort []", "ConstructorError"),
        ("config.yaml", b"[1, 2]", "a list, not a mapping of settings"),
        ("trainer.json", b"{", "JSONDecodeError"),
        ("trainer.json", b"[" * 100_000, "RecursionError"),
        ("trainer.json", b"[]", "a list, not an object"),
        ("trainer.json", b"{}", "KeyError: 'global_steps'"),
        ("trainer.json", b'{"global_steps": "3"}', "global_steps is no value of a trainer's state"),
        ("trainer.json", b'{"global_steps": -1}', "global_steps is no value of a trainer's state"),
        ("trainer.json", b'{"global_steps": 3, "identity": [1]}', "identity is no value of a trainer's state"),
        ("trainer.json", b'{"global_steps": 4}', "trainer.json is of step 4, manifest.json of step 3"),
    ],
)
def test_what_is_no_state_of_a_trainer_does_not_verify_though_its_hash_is_right(tmp_path, name, content, reason):
    def write(directory: str) -> None:
        write_run_state(directory, {"global_steps": 3}, config_yaml=to_yaml(from_dict(PPOConfig, PLAIN)))
        os.makedirs(os.path.join(directory, "actor"))
        for file, data in ((os.path.join("actor", ".metadata"), b""), (name, content)):
            with open(os.path.join(directory, file), "wb") as f:
                f.write(data)

    path = CheckpointStore(str(tmp_path)).commit(3, write)
    with pytest.raises(CheckpointError) as caught:
        verify_manifest(path)
    assert name in str(caught.value) and reason in str(caught.value) and "restore it, or remove" in str(caught.value)


def test_a_checkpoint_without_the_drivers_files_is_one_error(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/config.yaml is damaged \(FileNotFoundError"):
        settings_for_export(str(tmp_path), trust_remote_code=False)
