"""Every example, and every command of the README, runs unchanged on the tiny model."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import cli, main_ppo
from tests.support.driver.one_process import run_in_one_process
from tests.support.end_to_end.runs import metrics, settings, train

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


def run(*command: object, **environment: object) -> str:
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | {k: str(v) for k, v in environment.items()}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=variables, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(monkeypatch, example: str, *words: str) -> None:
    """Run a file of the examples as a program, in this process: starting another one takes most of the time."""
    monkeypatch.setattr(sys, "argv", [example, *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / example), run_name="__main__")
    assert not end.value.code


def test_a_custom_trainer_changes_and_adds_stages(tmp_path, tiny_qwen2, monkeypatch):
    run_here(monkeypatch, "examples/custom_trainer.py", *settings(tmp_path, tiny_qwen2))
    assert 0 < metrics(tmp_path / "run")[1]["train/rows_with_signal"] <= 1


def test_a_custom_worker_adds_a_method(tmp_path, tiny_qwen2, monkeypatch):
    run_here(monkeypatch, "examples/custom_worker.py", *settings(tmp_path, tiny_qwen2))
    assert metrics(tmp_path / "run")[1]["actor/weight_norm"] > 0


def test_middleware_from_a_file_changes_the_loop(tmp_path, tiny_qwen2, capfd):
    file = ROOT / "examples" / "middleware.py"
    rows = train(tmp_path, tiny_qwen2, trainer__middleware=f"[{file}:keep_what_teaches,{file}:log_stage_times]")
    assert all(
        0 < row["train/share_of_rows_that_teach"] <= 1 for row in rows if "train/share_of_rows_that_teach" in row
    )
    said = capfd.readouterr().err
    assert "step 2: " in said and "most of it " in said and "most of it step" not in said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nothing.py", "write it as path.py:fn"),
        ("nothing.py:fn", "no file nothing.py"),
        ("math:pi", "is float, not a function"),
    ],
)
def test_missing_middleware_is_rejected(tmp_path, tiny_qwen2, capsys, value, message):
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), f"trainer.middleware=[{value}]"]) == 2
    error = capsys.readouterr().err
    assert f"trainer.middleware={value}: " in error and message in error


def test_remote_calls_are_typed_and_run():
    assert "workers: 2 [1, 2, 3, 4, 5]" in run(sys.executable, "examples/typed_calls.py")


@pytest.mark.slow
def test_gsm8k_is_one_command_line_and_resumes_by_the_same_command(tmp_path, tiny_qwen2):
    raw = ROOT / "tests" / "data" / "raw"
    small = [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_prompt_length=400",
        "data.max_response_length=16",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.num_threads=1",
    ]
    where = {"RAW": raw, "DATA": tmp_path / "gsm8k", "MODEL": tiny_qwen2, "ROLLOUT": "hf", "PYTHON": sys.executable}
    for steps in (1, 2):
        out = run("bash", "examples/gsm8k_grpo.sh", f"trainer.total_training_steps={steps}", *small, **where)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    assert "global_step_2" in out


def test_a_checkpoint_is_exported_by_a_command(tmp_path, tiny_qwen2):
    train(tmp_path, tiny_qwen2, trainer__total_training_steps=1, trainer__test_freq=-1)
    out = run(sys.executable, "-m", "hybridrl.cli", "export", tmp_path / "run/global_step_1", tmp_path / "model")
    assert "exported" in out and (tmp_path / "model" / "model.safetensors").exists()


def test_help_and_resolved_settings_start_nothing():
    program = "import sys; sys.modules['ray'] = None; from hybridrl.main_ppo import main; sys.exit(main({}))"
    arguments = (["--help"], ["--cfg", "job", "algorithm.adv_estimator=grpo"])
    shown, resolved = run_in_one_process([program.format(words) for words in arguments])
    assert "data.train_batch_size" in shown.stdout and "adv_estimator: grpo" in resolved.stdout
    assert shown.returncode == resolved.returncode == 0


def test_existing_files_are_overwritten_neither_by_export_nor_by_the_quick_start(tmp_path, capsys):
    precious = tmp_path / "thesis.txt"
    precious.write_text("precious")
    assert cli.main(["export", str(tmp_path / "run/global_step_1"), str(tmp_path)]) == 2
    assert f"{tmp_path} exists and is not an empty directory" in capsys.readouterr().err
    done = subprocess.run(
        ["bash", "examples/quickstart/run.sh", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "quick start; name a new directory" in done.stderr
    assert precious.read_text() == "precious"
