"""The saved command of a run, and how `hybridrl job resume` repeats it."""

import json
import sys

import pytest

from hybridrl import cli
from hybridrl.driver.resume_command import FILE, resume_arguments, save_command
from hybridrl.errors import ConfigError


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
