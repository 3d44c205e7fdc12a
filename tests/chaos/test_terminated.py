"""SIGTERM to a real program on Ray: it commits and exits in time, and the resumed run ends the same."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
TERMINATED = 143
CHANGES = {
    "trainer__backend": "ray",
    "trainer__n_gpus_per_node": 2,
    "trainer__total_training_steps": 4,
    "trainer__val_before_train": False,
    "trainer__test_freq": -1,
    "trainer__save_freq": 4,
}


def start(folder: Path, model: Path, **changes) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "hybridrl.main_ppo", *settings(folder, model, **(CHANGES | changes))]
    return subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def wait_for(run: subprocess.Popen, there: Callable[[], bool]) -> None:
    """Wait until `there()` is true."""
    until = time.monotonic() + 300
    while not there():
        assert run.poll() is None and time.monotonic() < until, "it ended early, or takes too long"
        time.sleep(0.01)


def test_a_run_on_ray_commits_and_the_resumed_run_ends_the_same(tmp_path, tiny_qwen2):
    whole = start(tmp_path / "whole", tiny_qwen2)
    assert whole.wait(timeout=400) == 0, whole.stderr.read()
    parts = start(tmp_path / "parts", tiny_qwen2)
    logged = tmp_path / "parts/run/metrics.jsonl"
    wait_for(parts, lambda: logged.exists() and logged.read_text() != "")  # step 1 has ended, or nearly
    began = time.monotonic()
    parts.send_signal(signal.SIGTERM)
    err = parts.communicate(timeout=300)[1]
    print(f"exited {time.monotonic() - began:.1f} s after SIGTERM: {err.splitlines()[-1]}")
    assert parts.returncode == TERMINATED and re.search(r"^terminated; .*/global_step_[123] is committed", err, re.M), (
        err
    )
    assert len(list((tmp_path / "parts/run").glob("global_step*"))) == 1
    successor = start(tmp_path / "parts", tiny_qwen2)
    assert successor.wait(timeout=400) == 0, successor.stderr.read()
    ends = [weights(tmp_path / name / "run/global_step_4", tmp_path / f"hf_{name}") for name in ("whole", "parts")]
    assert largest_difference(*ends) == 0
    rows = [[row["actor/loss"] for row in metrics(tmp_path / name / "run")] for name in ("whole", "parts")]
    assert rows[0] == rows[1]
    result = audit(read_ledger(str(tmp_path / "parts/run" / FILE)))
    assert result.problems() == [] and sorted(result.steps) == [1, 2, 3, 4] and result.num_repeated == 0


@pytest.mark.parametrize("how", ["a second signal", "no time"])
def test_a_run_that_must_not_wait_exits_at_once_and_keeps_its_checkpoints(tmp_path, tiny_qwen2, how):
    slow = tmp_path / "slow.py"  # a step longer than the grace period
    slow.write_text(
        "import time\n"
        "def use(task, trainer):\n"
        "    task.insert_before('update_actor', lambda ctx: time.sleep(300 if trainer.global_steps == 2 else 0))\n"
    )
    changes = {
        "trainer__middleware": f"[{slow}:use]",
        "trainer__save_freq": 1,
        "trainer__grace_s": 2 if how == "no time" else 200,
    }
    run = start(tmp_path, tiny_qwen2, **changes)
    wait_for(run, (tmp_path / "run/global_step_1").exists)
    time.sleep(2)
    began = time.monotonic()
    run.send_signal(signal.SIGTERM)
    if how == "a second signal":
        time.sleep(1)
        run.send_signal(signal.SIGTERM)
    err = run.communicate(timeout=100)[1]
    print(f"{how}: exited {time.monotonic() - began:.1f} s after SIGTERM")
    assert run.returncode == TERMINATED and f"terminated; {tmp_path}/run/global_step_1 is committed" in err, err
    assert sorted(path.name for path in (tmp_path / "run").glob("global_step*")) == ["global_step_1"]
    assert time.monotonic() - began < 40
