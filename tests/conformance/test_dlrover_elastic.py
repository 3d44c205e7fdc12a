"""DLRover's own tests of elastic jobs, asked of this library.

One test per test of DLRover's `integration_test/elastic_training_test`. What a user has to change, besides the import:

| in DLRover | here |
|---|---|
| `PrimeMaster.create(job)`, `start()`, `wait()` | `job.submit(name, blocking=False)`, `wait()` |
| `get_status().stage`: INIT, RUNNING, STOPPED | the state of the job: starting, running, succeeded |
| `master.restart()` | `RunningJob.restart()` |
| a failed job: an exit code that is not 0 | the exception of the program, raised by `submit` |
| an exception restarts the role or the job | it would be raised again, so it ends the job; a loss restarts |
| `nproc_per_node(2)` of `node_num(3)` | two processes; `nnodes(3)` asks for six |
| the communication check before a start | none; a process that is lost before the group has met restarts the group |

The jobs take a quarter of a core per process, unless the test is about the devices of a command.
"""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.builder import DLJobBuilder
from hybridrl.master.plan.planner import choose_device
from hybridrl.master.service.client import list_masters
from hybridrl.master.service.journal import replay
from hybridrl.master.state.tables import JobPhase
from hybridrl.single_controller.placement.feasibility import NodeCapacity
from tests.master.jobs.test_submit import SMALL, left_of, wait_until
from tests.support.master import elastic_program

PROGRAM = str(Path(elastic_program.__file__))
FOUR = ["0 4 0 2 0 0", "1 4 1 2 0 0", "2 4 0 2 1 0", "3 4 1 2 1 0"]
on_a_cluster = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]


def marked(function):
    for mark in on_a_cluster:
        function = mark(function)
    return function


def elastic(entry, folder, *, nodes=2):
    """A builder of DLRover's elastic job: two processes on each of two nodes."""
    builder = DLJobBuilder().node_num(3).device_per_node(2).device_type("CPU").config({"c1": "v1", "out": str(folder)})
    builder.global_env({"e0": "v0"})
    return builder.train(entry).nnodes(nodes).nproc_per_node(2).resource(**SMALL).end()


def worlds(folder):
    """The lines of each rank."""
    return [path.read_text().splitlines() for path in sorted(Path(folder).glob("rank-*"))]


def state_of(journals):
    [journal] = Path(journals).iterdir()
    return replay(str(journal))[0]


@marked
def test_elastic_training(tmp_path):
    out, journals = tmp_path / "out", tmp_path / "journals"
    out.mkdir()
    running = elastic(elastic_program.waits_for_a_file, out).build().submit("e", blocking=False, journal=str(journals))
    wait_until(lambda: len(worlds(out)) == 4)
    described = ray.get(list_masters()[running.name].describe.remote(), timeout=30)
    assert described["state"] == JobPhase.RUNNING and not running.is_finished()
    (out / "gate").write_text("")
    assert running.wait(120) == 0 and running.is_finished()
    running.stop()  # of a job that has ended: nothing happens
    assert state_of(journals).state == JobPhase.SUCCEEDED
    with pytest.raises(ConfigError, match="the job has ended; submit it again"):
        running.restart()


@marked
def test_api_full(tmp_path):
    assert elastic(elastic_program.works, tmp_path).build().submit("test", master_cpu=1, master_memory=128) == 0
    assert worlds(tmp_path) == [[line] for line in FOUR]
    wait_until(lambda: not left_of("test-"))


@marked
@pytest.mark.parametrize("launcher", ["dlrover-run", "torchrun"])
def test_api_full_by_dlrover_run_cmd_and_by_torchrun_cmd(tmp_path, launcher):
    command = f"{launcher} --nnodes=2 --nproc_per_node=2 {PROGRAM} --out {tmp_path} --test 0"
    job = DLJobBuilder().by_dlrover_run_cmd(command).build()
    assert job.submit("test_cmd_api", master_memory=128) == 0  # four cores of four, for want of a GPU
    assert worlds(tmp_path) == [[line] for line in FOUR]
    wait_until(lambda: not left_of("test_cmd_api-"))


def test_a_command_takes_the_accelerator_of_the_cluster_and_without_one_its_cores(caplog):
    caplog.set_level(logging.WARNING)  # a library of an earlier test may have raised it
    builder = DLJobBuilder().by_dlrover_run_cmd(f"torchrun --nnodes=2 --nproc_per_node=2 {PROGRAM} --out x")
    spec = builder.build().spec
    assert spec.device_type == "AUTO"
    assert choose_device(spec, [NodeCapacity("a", {"CPU": 8}), NodeCapacity("b", {"NPU": 2})]).device_type == "NPU"
    chosen = choose_device(spec, [NodeCapacity("a", {"CPU": 8})])
    assert chosen.device_type == "CPU" and "device_type('CPU'), because the cluster has no accelerator" in caplog.text
    assert choose_device(chosen, [NodeCapacity("a", {"GPU": 8})]).device_type == "CPU"
    assert builder.device_type("TPU").build().spec.device_type == "TPU"  # what is said holds
    assert DLJobBuilder().train("a.b").build().spec.device_type == "GPU"


@marked
def test_api_full_with_cmd(tmp_path):
    command = f"{PROGRAM} --out {tmp_path} --test 0"
    assert elastic(command, tmp_path).build().submit("test", master_cpu=1, master_memory=128) == 0
    assert worlds(tmp_path) == [[line] for line in FOUR]


@marked
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"failover_exec_strategy": 0}, id="no_failover"),
        pytest.param({"job_max_restart": 1}, id="job_failover"),
        pytest.param({"job_max_restart": 1, "failover_exec_strategy": 2}, id="role_failover"),
    ],
)
def test_api_full_with_error(tmp_path, strategy):
    out, journals = tmp_path / "out", tmp_path / "journals"
    out.mkdir()
    job = elastic(elastic_program.raises, out, nodes=1).build()
    with pytest.raises(ArithmeticError, match="an error in the elastic role") as caught:
        job.submit("test", master_cpu=1, master_memory=128, journal=str(journals), **strategy)
    assert "raised in elastic-" in "\n".join(caught.value.__notes__)
    assert {line for [line] in worlds(out)} <= {"0 2 0 2 0 0", "1 2 1 2 0 0"}  # once each
    assert state_of(journals).state == JobPhase.FAILED
    wait_until(lambda: not left_of("test-"))


@marked
def test_comm_fault(tmp_path):
    assert elastic(elastic_program.is_killed_before_it_joins, tmp_path, nodes=1).build().submit("fault") == 0
    assert worlds(tmp_path) == [["0 2 0 2 0 0", "0 2 0 2 0 1"], ["1 2 1 2 0 0", "1 2 1 2 0 1"]]


@marked
def test_failover_training(tmp_path):
    out, journals = tmp_path / "out", tmp_path / "journals"
    out.mkdir()
    job = elastic(elastic_program.is_killed_once, out, nodes=1).build()
    job.workloads["elastic"].comm_pre_check = False
    strategy = {"failover_trigger_strategy": 2, "failover_exec_strategy": 1, "job_max_restart": 3}
    assert job.submit("failover", journal=str(journals), **strategy) == 0
    assert worlds(out) == [["0 2 0 2 0 0", "0 2 0 2 0 1"], ["1 2 1 2 0 0", "1 2 1 2 0 1"]]
    state = state_of(journals)
    assert state.state == JobPhase.SUCCEEDED and state.workers["elastic-0"].incarnation == 2


@marked
def test_failover_entire_job(tmp_path):
    out, journals = tmp_path / "out", tmp_path / "journals"
    out.mkdir()
    job = elastic(elastic_program.waits_for_a_file, out, nodes=1).build()
    running = job.submit("entire", blocking=False, journal=str(journals))
    wait_until(lambda: len(worlds(out)) == 2)
    running.restart()
    wait_until(lambda: all(len(lines) == 2 for lines in worlds(out)))
    (out / "gate").write_text("")
    assert running.wait(120) == 0
    assert worlds(out) == [["0 2 0 2 0 0", "0 2 0 2 0 1"], ["1 2 1 2 0 0", "1 2 1 2 0 1"]]
    state = state_of(journals)
    assert state.state == JobPhase.SUCCEEDED and state.workers["supervisor"].incarnation == 2
    wait_until(lambda: not left_of("entire-"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_master_worker_isolation_scheduling(monkeypatch):
    monkeypatch.setenv("DLROVER_UNIFIED_MASTER_ISOLATION_SCHEDULE_RESOURCE", "MR")
    monkeypatch.setenv("DLROVER_UNIFIED_WORKER_ISOLATION_SCHEDULE_RESOURCE", "WR")
    driver = [sys.executable, "-m", "tests.support.master.isolated_job"]
    run = subprocess.run(driver, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    code, taken, *processes = next(line for line in run.stdout.splitlines() if " | " in line).split(" | ")
    assert code == "0" and taken == "{'MR': 1, 'WR': 4}" and processes == ["WR 1.0, MR None"] * 4
