"""What a program prints when a run is interrupted or fails (one true line)."""

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.driver.run_context import RunContext
from hybridrl.errors import CheckpointError, PlacementError
from hybridrl.trainer.checkpoint.store import CheckpointStore, newest_checkpoint

ROOT = Path(__file__).parents[2]


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
    assert (
        run_program(interrupt, context=RunContext(directory=str(tmp_path)), newest_checkpoint=newest_checkpoint) == 130
    )
    shown = capsys.readouterr().err
    assert shown.startswith(f"interrupted; {tmp_path}/global_step_10 is committed") and shown.count("\n") == 1


@pytest.mark.parametrize("directory", ["empty", "not_there", None])
def test_an_interrupted_run_without_a_commit_says_that_the_next_one_starts_from_step_0(tmp_path, capsys, directory):
    (tmp_path / "empty").mkdir()
    context = RunContext(directory=directory and str(tmp_path / directory))
    assert run_program(interrupt, context=context, newest_checkpoint=newest_checkpoint) == 130
    shown = capsys.readouterr().err
    assert shown.startswith("interrupted; nothing was committed, the next run starts from step 0")
    assert ("trainer.save_freq=N" in shown) == (directory is not None)


def test_the_exit_code_is_that_of_the_work():
    assert run_program(lambda: 3) == 3 and run_program(lambda: None) == 0


def test_a_half_written_checkpoint_is_none(tmp_path, capsys):
    (tmp_path / "global_step_4.partial").mkdir()
    run_program(interrupt, context=RunContext(directory=str(tmp_path)), newest_checkpoint=newest_checkpoint)
    assert "nothing was committed" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_a_bug_shows_where_it_is(capsys):
    assert run_program(fail, context=RunContext()) == 1
    assert capsys.readouterr().err == "error: global_step_4 is damaged; take an earlier one\n"
    assert run_program(break_down, context=RunContext()) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ZeroDivisionError: our own bug\nTraceback") and "in break_down" in shown


def test_a_job_that_no_machine_can_hold_is_a_mistake_in_the_command(tmp_path, capsys):
    def request_too_much():
        raise PlacementError("no node can hold 99 worker processes")

    assert run_program(request_too_much, context=RunContext(directory=str(tmp_path))) == 2
    assert capsys.readouterr().err == "no node can hold 99 worker processes\n"


@pytest.mark.parametrize(("steps", "outlook"), [((), "nothing was committed"), ((2,), "{}/global_step_2 is committed")])
def test_the_traceback_of_a_run_is_saved_in_its_directory_and_the_next_run_is_announced(
    tmp_path, capsys, steps, outlook
):
    commit(tmp_path, *steps)
    assert run_program(fail, context=RunContext(directory=str(tmp_path)), newest_checkpoint=newest_checkpoint) == 1
    last = capsys.readouterr().err.splitlines()[1]
    assert last.startswith(f"the full traceback is in {tmp_path}/error.log; {outlook.format(tmp_path)}")
    assert "the next run " in last
    assert "CheckpointError: global_step_4 is damaged" in (tmp_path / "error.log").read_text()


def test_an_error_of_ours_stays_short_where_no_traceback_can_be_saved(tmp_path, capsys):
    (tmp_path / "error.log").mkdir()  # so that nothing can be written there, like on a full disk
    assert run_program(fail, context=RunContext(directory=str(tmp_path))) == 1
    error, last = capsys.readouterr().err.splitlines()
    assert error.startswith("error: global_step_4 is damaged")
    assert last.startswith(f"{tmp_path}/error.log cannot be written (Is a directory); nothing was committed")
    assert run_program(break_down, context=RunContext(directory=str(tmp_path))) == 1
    assert "in break_down" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "model_key"),
    [("hybridrl.main_ppo", "actor_rollout_ref.model.path"), ("hybridrl.main_sft", "model.path")],
)
def test_ctrl_c_while_libraries_are_imported_is_no_traceback(tmp_path, tiny_qwen2, program, model_key):
    words = [
        f"data.train_files={ROOT / 'README.md'}",
        f"{model_key}={tiny_qwen2}",
        f"trainer.default_local_dir={tmp_path}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", program, *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in err


@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_requests_of_agents_are_not_logged_one_by_one(client, monkeypatch):
    monkeypatch.setattr(logging.getLogger(client), "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    set_up_logging()
    assert not logging.getLogger(client).isEnabledFor(logging.INFO)
    assert logging.getLogger(client).isEnabledFor(logging.WARNING)
