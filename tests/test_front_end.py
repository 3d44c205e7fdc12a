"""What a front end says when a run is interrupted or fails: one line, and what it says is so."""

import pytest

from hybridrl.errors import CheckpointError
from hybridrl.front_end import run_front_end
from hybridrl.trainer.checkpoint import CheckpointStore


def interrupt():
    raise KeyboardInterrupt


def fail():
    raise CheckpointError("global_step_4 is damaged; take an earlier one")


def break_down():
    raise ZeroDivisionError("our own bug")


def commit(directory, *steps):
    for step in steps:
        CheckpointStore(str(directory)).commit(step, lambda path: None)


def test_an_interrupted_run_names_its_newest_commit(tmp_path, capsys):
    commit(tmp_path, 2, 10)
    assert run_front_end(interrupt, log_directory=lambda: str(tmp_path)) == 130
    shown = capsys.readouterr().err
    assert shown.startswith(f"interrupted; {tmp_path}/global_step_10 is committed") and shown.count("\n") == 1


@pytest.mark.parametrize("directory", ["empty", "not_there", None])
def test_an_interrupted_run_without_a_commit_says_that_the_next_one_starts_anew(tmp_path, capsys, directory):
    (tmp_path / "empty").mkdir()
    assert run_front_end(interrupt, log_directory=lambda: directory and str(tmp_path / directory)) == 130
    shown = capsys.readouterr().err
    assert shown.startswith("interrupted; nothing was committed, the next run starts anew")
    assert ("trainer.save_freq=N" in shown) == (directory is not None)


def test_half_a_commit_is_none(tmp_path, capsys):
    (tmp_path / "global_step_4.partial").mkdir()
    run_front_end(interrupt, log_directory=lambda: str(tmp_path))
    assert "nothing was committed" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_a_bug_shows_where_it_is(capsys):
    assert run_front_end(fail, log_directory=lambda: None) == 1
    assert capsys.readouterr().err == "error: global_step_4 is damaged; take an earlier one\n"
    assert run_front_end(break_down, log_directory=lambda: None) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ZeroDivisionError: our own bug\nTraceback") and "in break_down" in shown


def test_the_traceback_of_a_run_is_kept_in_its_directory(tmp_path, capsys):
    assert run_front_end(fail, log_directory=lambda: str(tmp_path)) == 1
    assert capsys.readouterr().err.splitlines()[1] == f"the whole traceback is in {tmp_path}/error.log"
    assert "CheckpointError: global_step_4 is damaged" in (tmp_path / "error.log").read_text()
