"""Processes of a job find and call each other, also while they run something, and after a loss."""

import pytest

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.builder import DLJobBuilder
from hybridrl.master.jobs.job_context import current_context
from hybridrl.master.jobs.recipes import worker_recipes
from hybridrl.master.plan.planner import plan_job
from tests.master.jobs.test_submit import SMALL, left_of, wait_until
from tests.support.master.sample_job import Caller, Counter, FromJob, LosesItsPeer, WorksUntilStopped, opens_the_gate

pytestmark = pytest.mark.timeout(300)


@pytest.mark.usefixtures("ray_cluster")
def test_a_role_that_runs_beside_a_trainer_is_called_from_any_process_before_and_after_a_loss(tmp_path):
    out = tmp_path / "out"
    builder = DLJobBuilder().device_type("CPU").config({"out": str(out)}).trainer(FromJob).resource(**SMALL)
    builder.workload("counter", Counter).total(2).per_node(2).resource(**SMALL).restart("process").not_driver()
    builder.workload("caller", Caller).resource(**SMALL)
    assert builder.build().submit("rosters", journal=str(tmp_path)) == 0  # the counters still count
    unknown, runs, loss, restarted, stale = out.read_text().splitlines()
    assert unknown == "role 'nobody' is unknown: the job's roles are counter, caller, trainer"
    assert runs == "True ['counted', 'module_context', 'process'] ('counter', 'CPU', 2)"
    assert "worker counter-0 was lost while running process(): killed by SIGKILL" in loss
    assert restarted == "0 1 [False, True] True"  # one new process, one epoch later
    assert stale.startswith("killed by SIGKILL {'counter': [0]} True")
    wait_until(lambda: not left_of("rosters-"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_role_that_drives_holds_the_job_after_its_trainer(tmp_path):
    config = {"out": str(tmp_path / "out"), "until": str(tmp_path / "gate")}
    builder = DLJobBuilder().device_type("CPU").config(config).trainer(opens_the_gate).resource(**SMALL)
    assert builder.workload("counter", Counter).resource(**SMALL).build().submit("holds") == 0
    assert (tmp_path / "out.counted").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_ends_with_the_loss_of_another_role_starts_again_and_finds_its_new_process(tmp_path):
    builder = DLJobBuilder().device_type("CPU").config({"out": str(tmp_path / "out")})
    builder.workload("counter", Counter).resource(**SMALL).not_driver()
    builder.workload("caller", LosesItsPeer).resource(**SMALL)
    assert builder.build().submit("peers") == 0
    assert (tmp_path / "out").read_text() == "0 1 "


def test_an_endpoint_of_a_class_and_of_its_module_is_refused(tmp_path):
    file = tmp_path / "both.py"
    file.write_text(
        "from hybridrl.single_controller.dispatch import register\n"
        "@register()\ndef score(): ...\n"
        "class Scorer:\n    @register()\n    def score(self): ...\n"
    )
    spec = DLJobBuilder().trainer(FromJob).workload("scorer", f"{file}:Scorer").build().spec
    with pytest.raises(ConfigError, match="role 'scorer': score of Scorer.* function.*register one"):
        worker_recipes(spec, plan_job(spec, "j-1"), job="j")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_stop_ends_what_a_role_runs_by_system_exit(tmp_path):
    out = tmp_path / "out"
    job = DLJobBuilder().device_type("CPU").config({"out": str(out)}).workload("works", WorksUntilStopped)
    running = job.resource(**SMALL).build().submit("stops", blocking=False, journal=str(tmp_path))
    wait_until(lambda: out.exists() and out.read_text() == "works")
    running.stop("requested by a test")
    assert running.wait(timeout_s=60) == 143 and out.read_text() == "left"


def test_a_process_outside_of_a_job_has_no_context():
    with pytest.raises(ConfigError, match=r"this process belongs to no submitted job.*submit\(\)"):
        current_context()
