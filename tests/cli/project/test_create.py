"""`hybridrl init`: the directory that it makes passes its own tests and runs at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import cli

ROOT = Path(__file__).parents[3]


def test_a_directory_is_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine"]) == 0
    shown = capsys.readouterr().out
    named = {"reward.py", "agent_loop.py", "stage.py", "make_data.py", "config.yaml", "run.sh", "tests/test_project.py"}
    assert all((tmp_path / "mine" / name).is_file() and name in shown for name in named)
    assert cli.main(["init", "mine"]) == 2
    assert capsys.readouterr().err == "NAME mine: exists already; choose another name\n"


def test_a_place_that_cannot_be_written_is_one_error(capsys):
    assert cli.main(["init", "/proc/mine"]) == 2
    assert capsys.readouterr().err.startswith("NAME /proc/mine: cannot be written")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_project_passes_its_tests_and_its_run_ends_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine"]) == 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    run = {"cwd": tmp_path / "mine", "env": environment, "check": True, "timeout": 280}
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], **run)
    subprocess.run(["bash", "run.sh"], **run)
    assert (tmp_path / "mine" / "runs" / "first" / "global_step_10").is_dir()
