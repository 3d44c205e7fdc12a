"""The examples of the workload SDK: what their commands print, that they learn, and that they resume."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


SUBMIT = (sys.executable, "-m", "hybridrl.main_job", ROOT / "examples/openrlhf_ppo/main.py")


def run(*command, folder=ROOT, code=0):
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": python_path, "PYTHON": sys.executable}
    done = subprocess.run([*map(str, command)], cwd=folder, env=variables, timeout=560, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def start(example, *arguments):
    return run(sys.executable, "-m", f"examples.{example}.main", *arguments)


def scores(text, name="score"):
    return [float(number) for number in re.findall(rf"step +\d+  {name} +([\d.]+)", text)]


@pytest.mark.parametrize("example", ["workload_sdk", "control_task"])
def test_a_dry_run_prints_the_plan_and_starts_nothing(example):
    out = start(example, "--dry-run")
    assert re.search(r"placement groups, \d processes", out) and "trainer" in out and "step" not in out


def test_the_dry_run_of_ppo_prints_the_job_and_its_six_roles():
    out = run("bash", "examples/openrlhf_ppo/run.sh", "--dry-run", "--init_kl_coef", 0.01)
    assert "examples.openrlhf_ppo.ppo_actor:PolicyModelActor" in out and "actor gives its weights to rollout" in out
    assert all(re.search(rf"^{role} ", out, re.MULTILINE) for role in ("actor", "critic", "reward", "reference"))
    without = run("bash", "examples/openrlhf_ppo/run.sh", "--dry-run", "--init_kl_coef", 0)
    assert "reference" not in without


def test_a_mistake_in_the_command_of_a_program_is_one_line():
    out = run(sys.executable, "-m", "examples.openrlhf_ppo.main", "--dry-run", "--actor_num_nodes", "0", code=2)
    assert out == "role 'actor': num_nodes=0 must be a whole number, 1 or more\n"


def test_ppo_is_submitted_from_its_file():
    assert "actor gives its weights to rollout" in run(*SUBMIT, "--dry-run")


@pytest.mark.slow
def test_ppo_that_is_submitted_from_its_file_learns(tmp_path):
    out = run(*SUBMIT, folder=tmp_path)  # its checkpoints are relative to the directory
    found = scores(out)
    assert len(found) == 60 and found[0] < 0.2 and sum(found[-10:]) / 10 > 0.7, found
    assert (tmp_path / "outputs" / "openrlhf_ppo" / "global_step_60" / "manifest.json").exists()


@pytest.mark.slow
def test_the_same_command_resumes_ppo_with_the_same_bits(tmp_path):
    small = ["--rollout_batch_size", 32, "--train_batch_size", 16, "--hidden_size", 32]
    first = start("openrlhf_ppo", *small, "--save_path", tmp_path / "two", "--num_steps", 2)
    second = start("openrlhf_ppo", *small, "--save_path", tmp_path / "two", "--num_steps", 4)
    assert "resumed from" not in first and "global_step_2" in second
    whole = start("openrlhf_ppo", *small, "--save_path", tmp_path / "one", "--num_steps", 4)
    assert scores(first) + scores(second) == scores(whole)
    for role in ("actor", "critic"):
        ends = [torch.load(tmp_path / name / "global_step_4" / role / "rank_0.pt")["model"] for name in ("one", "two")]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
def test_grpo_in_the_first_style_learns():
    found = scores(start("workload_sdk"))
    assert found[0] < 0.2 and sum(found[-5:]) / 5 > 0.9


@pytest.mark.slow
def test_the_control_task_learns():
    pytest.importorskip("gymnasium", reason="needs gymnasium (pip install -e '.[control]')")
    found = scores(start("control_task", "--num_steps", 25), name="mean return")
    assert found[0] < 60 and max(found) > 300
