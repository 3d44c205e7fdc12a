"""`main_ppo` on a shared cluster: it is killed or stopped, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
import ray

from hybridrl.master.service import job_commands
from hybridrl.master.service.client import list_masters
from hybridrl.master.service.journal import history, replay
from hybridrl.master.state.tables import JobPhase
from hybridrl.single_controller.placement.placement_groups import find_leftover_groups
from hybridrl.system.process_stat import read_process_stat
from tests.support.end_to_end.runs import settings

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400), pytest.mark.usefixtures("ray_cluster")]


def start_run(folder, model):
    """Start a run on this cluster and wait for its second step; return (process, run, the master's description)."""
    changes = {"trainer__master": True, "trainer__experiment_name": "left", "trainer__total_training_steps": 500}
    argv = settings(folder, model, trainer__backend="ray", **changes)
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "OMP_NUM_THREADS": "1"}
    with open(folder / "run.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridrl.main_ppo", *argv], env=environment, stdout=log, stderr=log
        )
    end = time.monotonic() + 300
    while True:
        assert process.poll() is None and time.monotonic() < end, (folder / "run.log").read_text()
        time.sleep(0.5)
        for run, master in list_masters().items():
            if run.startswith("left-"):
                seen = ray.get(master.describe.remote(), timeout=60)
                if seen["step"] >= 2:
                    return process, run, seen


def seconds_until_nothing_is_left(run, seen):
    start = time.monotonic()
    pids = [seen["pid"], *(worker["pid"] for worker in seen["workers"].values())]
    while run in list_masters() or any(read_process_stat(pid).state for pid in pids):
        assert time.monotonic() < start + 60
        time.sleep(0.05)
    return time.monotonic() - start


def test_a_program_that_is_killed_leaves_nothing_behind_not_even_a_frozen_worker(tmp_path, tiny_qwen2):
    process, run, seen = start_run(tmp_path, tiny_qwen2)
    os.kill(seen["workers"]["actor_rollout-0"]["pid"], signal.SIGSTOP)
    process.kill()
    process.wait(30)
    seconds = seconds_until_nothing_is_left(run, seen)
    print(f"nothing left {seconds:.1f} s after the driver was killed")
    assert seconds < 10
    state, _ = replay(seen["journal"])
    assert state.state == JobPhase.FAILED
    assert state.reason == "its program was killed"
    assert not find_leftover_groups(run)


def test_a_program_and_its_driver_that_are_killed_together_leave_nothing_behind(tmp_path, tiny_qwen2):
    process, run, seen = start_run(tmp_path, tiny_qwen2)
    for pid in (process.pid, seen["workers"]["trainer"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    process.wait(30)
    seconds = seconds_until_nothing_is_left(run, seen)
    print(f"nothing left {seconds:.1f} s after program and driver were killed")
    assert seconds < 10
    assert replay(seen["journal"])[0].reason == "the trainer was lost, and so was the supervisor that restarts it"
    assert not find_leftover_groups(run)


def test_a_job_that_is_stopped_commits_and_leaves(tmp_path, tiny_qwen2):
    process, run, seen = start_run(tmp_path, tiny_qwen2)
    assert job_commands.stop("left", None, timeout_s=200) == f"{run} has ended\n"
    assert process.wait(60) == 143, (tmp_path / "run.log").read_text()
    state, _ = replay(seen["journal"])
    assert state.state == JobPhase.STOPPED
    assert os.path.isdir(state.commit)
    assert type(history(seen["journal"])[-1].event).__name__ == "JobEnded"
    assert seconds_until_nothing_is_left(run, seen) < 10
