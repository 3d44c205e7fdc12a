"""Jobs that really run: a trainer process, worker processes, and nothing left of them afterwards."""

import re
import time

import pytest
import ray
from ray.util.placement_group import placement_group_table

from hybridrl.errors import ConfigError, PlacementError, WorkerLost
from hybridrl.master.jobs.builder import DLJobBuilder, RLJobBuilder
from hybridrl.master.service.job_commands import list_jobs, logs, status, stop
from hybridrl.master.service.journal import replay
from hybridrl.master.state.tables import JobPhase
from tests.support.master.sample_job import CleansUp, FitTrainer, Trainer, works_until_file

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]
A = "tests.support.master.sample_job:Adder"
SMALL = {"cpu": 0.25}


def described(trainer, out, **config):
    """A builder with two collocated roles on two slots."""
    return (
        RLJobBuilder()
        .device_type("CPU")
        .config({"out": str(out), "amount": 10, **config})
        .global_env({"GREETING": "hello"})
        .trainer(trainer)
        .resource(**SMALL)
        .actor(A)
        .total(2)
        .per_node(2)
        .env({"GREETING": "actor"})
        .rollout(A)
        .total(1)
        .with_collocation("actor", "rollout")
    )


def left_of(job):
    """Return the placement groups and actors of jobs whose name starts so."""
    groups = [entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]
    actors = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in (*groups, *actors) if name.startswith(job)]


def wait_until(condition, timeout_s=120):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_job_runs_its_trainer_on_the_planned_workers_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the supervisor's working directory is another one
    job = described(Trainer, tmp_path / "out").reward(A).resource(cpu=0.5).build()
    assert job.submit("first", journal="journals") == 0
    [journal] = (tmp_path / "journals").iterdir()
    assert replay(str(journal))[0].run == journal.name
    mine, *answers = (tmp_path / "out").read_text().splitlines()
    assert mine.startswith("first-") and mine.endswith(" hello")
    assert answers == [  # 1 + amount + rank; and no variable that is not as planned
        "actor: [11, 12] [set(), set()]",
        "rollout: [11] [set()]",
        "reward: [11] [set()]",
    ]
    wait_until(lambda: not left_of("first-"))


@pytest.mark.slow
def test_a_workers_exception_keeps_its_type_on_the_way_to_the_submitter(tmp_path):
    with pytest.raises(ArithmeticError, match="an error in the worker") as caught:
        described(FitTrainer, tmp_path / "out").build().submit("failing")
    assert caught.value.__notes__[0] in ("raised in actor-0, fail()", "raised in actor-1, fail()")
    notes = "\n".join(caught.value.__notes__)  # with the tracebacks of the worker and of the trainer
    assert "in fail\n" in notes and "in fit\n" in notes and 'raise ArithmeticError("an error in the worker")' in notes
    assert (tmp_path / "out").read_text() == "ready"
    wait_until(lambda: not left_of("failing-"))


@pytest.mark.slow
def test_a_job_in_the_background_can_be_stopped_and_two_of_one_name_run_at_once(tmp_path):
    def start(number):
        out = tmp_path / f"out{number}"
        small = DLJobBuilder().device_type("CPU").config({"out": str(out), "until": str(tmp_path / f"end{number}")})
        return small.trainer(works_until_file).resource(**SMALL).workload("actor", A).resource(cpu=0.5).build().submit(
            "twice", blocking=False
        ), out

    (first, out1), (second, out2) = start(1), start(2)
    wait_until(lambda: out1.exists() and out2.exists())
    assert first.name != second.name and not first.is_finished()
    first.stop("requested by a test")
    assert first.wait(timeout_s=60) == 143 and out1.read_text() == "waiting"
    state, _ = replay(first.journal)
    assert (state.state, state.reason) == (JobPhase.STOPPED, "requested by a test")
    wait_until(lambda: not left_of(first.name))
    (tmp_path / "end2").write_text("")
    assert second.wait(timeout_s=120) == 0 and second.is_finished() and out2.read_text() == "done"
    wait_until(lambda: not left_of(second.name))


@pytest.mark.slow
def test_hybridrl_job_stops_a_submitted_job_and_its_trainer_can_clean_up(tmp_path):
    job = DLJobBuilder().device_type("CPU").config({"out": str(tmp_path / "out")}).trainer(CleansUp).resource(**SMALL)
    running = job.workload("actor", A).resource(**SMALL).build().submit("found", blocking=False, journal=str(tmp_path))
    wait_until((tmp_path / "out").exists)
    assert re.search(rf"^{running.name} +found +\w+ +0 +3/3 alive", list_jobs(), re.MULTILINE)
    wait_until(lambda: "trainer.run for" in status(running.name, None))  # with the next heartbeat
    assert re.search(r"^trainer-0 +alive", status("found", None), re.MULTILINE)
    assert stop("found", None, timeout_s=60) == f"{running.name} has ended\n"
    assert running.wait(timeout_s=60) == 143 and (tmp_path / "out").read_text().split() == ["works", "leaves"]
    assert "StopRequested" in logs(running.journal, None)
    wait_until(lambda: not left_of("found-"))


@pytest.mark.slow
def test_whoever_waits_for_a_job_whose_supervisor_is_lost_learns_how_to_go_on(tmp_path):
    job = DLJobBuilder().device_type("CPU").config({"out": str(tmp_path / "out")}).trainer(CleansUp).resource(**SMALL)
    running = job.build().submit("orphan", blocking=False, journal=str(tmp_path))
    wait_until((tmp_path / "out").exists)
    ray.kill(running.supervisor, no_restart=True)
    with pytest.raises(WorkerLost) as lost:
        running.wait(timeout_s=120)
    assert "start the same command again" in "".join(lost.value.__notes__)
    running.stop()
    wait_until(lambda: not left_of("orphan-"))


def test_a_job_that_does_not_fit_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(PlacementError, match=r"'huge' \(1000 CPU\).*missing.*resource\(\) of huge"):
        described(Trainer, tmp_path / "out").workload("huge", A).resource(cpu=1000).build().submit("huge")
    assert not left_of("huge-")


@pytest.mark.slow
def test_workers_without_a_caller_are_planned_but_not_started(capsys):
    job = DLJobBuilder().device_type("CPU").workload("a", A).resource(**SMALL).build()
    assert job.submit("quiet", dry_run=True) == 0 and "a 0 of 1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"role 'a': Adder has no run\(\).*trainer"):
        job.submit("quiet")


def test_a_class_that_requires_an_unknown_argument_is_named(tmp_path):
    job = (
        DLJobBuilder()
        .device_type("CPU")
        .trainer("tests.support.master.sample_job:Adder")
        .resource(**SMALL)
        .workload("a", A)
        .build()
    )
    with pytest.raises(ConfigError, match="role 'trainer': Adder requires .*'role'.* job"):
        job.submit("asking")
