import json
import sys

import pytest

from hybridrl import cli
from hybridrl.driver.resume_command import FILE, note_command, resuming
from hybridrl.errors import ConfigError


def test_the_command_of_a_run_is_given_again_and_goes_on_from_its_last_commit(tmp_path, monkeypatch):
    begun = [
        sys.executable,
        "-m",
        "hybridrl.main_ppo",
        "data.seed=1",
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=x",
    ]
    monkeypatch.setattr(sys, "orig_argv", begun)
    monkeypatch.chdir(tmp_path)
    note_command(str(tmp_path))
    command, where = resuming(str(tmp_path), ["data.seed=2"])
    assert where == str(tmp_path)
    assert command == [sys.executable, "-m", "hybridrl.main_ppo", "trainer.resume_mode=auto", "data.seed=2"]


def test_the_command_line_shows_what_it_would_run(tmp_path, capsys):
    (tmp_path / FILE).write_text(json.dumps({"command": ["python", "data.seed=1", "a=b c"], "directory": "/where"}))
    assert cli.main(["job", "resume", str(tmp_path), "data.seed=2", "--print"]) == 0
    assert capsys.readouterr().out == "cd /where && python 'a=b c' trainer.resume_mode=auto data.seed=2\n"


@pytest.mark.parametrize("content", [None, "{", json.dumps({"command": ["python"]})])
def test_a_directory_without_a_command_is_refused_with_the_way_out(tmp_path, content):
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError, match="name a run's directory"):
        resuming(str(tmp_path))
