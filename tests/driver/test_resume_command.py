"""The saved command of a run, and how `hybridrl job resume` repeats it."""

import json
import re
import stat
import sys

import pytest

from hybridrl import cli
from hybridrl.config.introspection import keys, to_dict
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SFTConfig
from hybridrl.driver.resume_command import FILE, resume_arguments, resume_run, save_command
from hybridrl.errors import ConfigError
from hybridrl.system.secrets import without_secret, without_secrets


def test_a_saved_command_is_repeated_with_resume_mode_auto_and_changes(tmp_path, monkeypatch):
    original = [
        sys.executable,
        "-m",
        "hybridrl.main_ppo",
        "data.seed=1",
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=x",
    ]
    monkeypatch.setattr(sys, "orig_argv", original)
    monkeypatch.chdir(tmp_path)
    save_command(str(tmp_path))
    command, where = resume_arguments(str(tmp_path), ["data.seed=2"])
    assert where == str(tmp_path)
    assert command == [sys.executable, "-m", "hybridrl.main_ppo", "trainer.resume_mode=auto", "data.seed=2"]


def test_print_shows_the_command_without_running_it(tmp_path, capsys):
    (tmp_path / FILE).write_text(json.dumps({"command": ["python", "data.seed=1", "a=b c"], "directory": "/where"}))
    assert cli.main(["job", "resume", str(tmp_path), "data.seed=2", "--print"]) == 0
    assert capsys.readouterr().out == "cd /where && python 'a=b c' trainer.resume_mode=auto data.seed=2\n"


@pytest.mark.parametrize("content", [None, "{", json.dumps({"command": ["python"]})])
def test_a_directory_without_a_command_is_refused_with_a_hint(tmp_path, content):
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError, match="name a run's directory"):
        resume_arguments(str(tmp_path))


SECRETS = [
    "custom_reward_function.kwargs.api_key=sk-123",
    "+custom_reward_function.kwargs.judge_api_key=sk-123",
    "+custom_reward_function.kwargs.hf_token=sk-123",
    "custom_reward_function.kwargs={url: http://x, password: sk-123}",
    "custom_reward_function.kwargs={'API_KEY':'sk-123'}",
    "plugin.secret='sk-123'",
]


@pytest.mark.parametrize("word", SECRETS)
def test_a_secret_is_not_saved_and_is_asked_for_when_the_run_resumes(tmp_path, monkeypatch, word):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "hybridrl.main_ppo", word, "data.prompt_key=p"])
    save_command(str(tmp_path))
    assert "sk-123" not in (tmp_path / FILE).read_text()
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"no value of {re.escape(key)}, .*not saved"):
        resume_arguments(str(tmp_path))
    command, _ = resume_arguments(str(tmp_path), [word])
    assert command[-1] == word and "data.prompt_key=p" in command


def test_no_setting_of_ours_is_taken_for_a_secret():
    for name in [*keys(PPOConfig), *keys(SFTConfig)]:
        assert without_secret(f"{name}=5") == f"{name}=5"
    config = to_dict(PPOConfig())
    assert without_secrets(config) == config


def test_the_saved_command_is_read_by_its_user_only(tmp_path):
    save_command(str(tmp_path))
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", '{"command": 5, "directory": "/"}', '{"command": [5], "directory": "/"}']
)
def test_what_is_no_command_is_refused(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError, match="name a run's directory"):
        resume_arguments(str(tmp_path))


@pytest.mark.parametrize(("program", "directory"), [("/no/such/python", "/"), (sys.executable, "/no/such/directory")])
def test_a_command_that_cannot_be_started_is_one_error(tmp_path, monkeypatch, program, directory):
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({"command": [program], "directory": directory}))
    with pytest.raises(ConfigError, match=f"{FILE}: {program} .*in {directory} .No such file"):
        resume_run(str(tmp_path))
