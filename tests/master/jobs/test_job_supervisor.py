"""Submitted jobs that lose a process: what is restarted, what is not, and when the job gives up."""

import os
import re
import signal
import time

import pytest
import ray

from hybridrl.driver.program import format_error
from hybridrl.errors import StorageError, WorkerLost
from hybridrl.master.jobs.builder import DLJobBuilder
from hybridrl.master.service.client import list_masters
from hybridrl.master.service.job_commands import status
from hybridrl.master.service.journal import replay
from hybridrl.master.state.tables import JobPhase
from hybridrl.single_controller.worker import Worker
from hybridrl.system.process_stat import read_process_stat
from tests.master.jobs.test_submit import SMALL, A, left_of, wait_until
from tests.support.master.sample_job import (
    dies_itself,
    loses_a_worker,
    recovers_a_worker,
    repeats_an_exception,
    restarts_downstream,
    waits_after_a_commit,
)

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300), pytest.mark.slow]


def described(trainer, out, *, restart="role", total=2, max_restart=10, **config):
    """A builder of a job with a trainer and an actor of some processes."""
    builder = DLJobBuilder().device_type("CPU").config({"out": str(out), **config})
    builder.trainer(trainer).resource(**SMALL).max_restart(max_restart)
    return (
        builder.workload("actor", A)
        .total(total)
        .per_node(2)
        .resource(**SMALL)
        .restart(restart)
        .max_restart(max_restart)
    )


def state_of(folder):
    [journal] = folder.glob("*/events-*.jsonl")
    return replay(str(journal.parent))[0]


def test_a_trainer_that_does_not_handle_a_loss_is_restarted_with_its_reported_progress(tmp_path):
    out = tmp_path / "out"
    job = described(loses_a_worker, out, restart="process", victim=["actor", 1]).build()
    assert job.submit("loses", journal=str(tmp_path)) == 0
    first, second = out.read_text().splitlines()
    assert first.startswith("0 0 - {'actor': [0, 1]} ")
    assert second.startswith("1 3 global_step_3 {'actor': [1]} ")
    (kept, lost), (same, new) = first.split()[-2:], second.split()[-2:]
    assert kept == same and lost != new  # the other worker was not restarted
    state = state_of(tmp_path)
    assert (state.state, state.step, state.commit, state.workers["actor-1"].incarnation) == (
        JobPhase.SUCCEEDED,
        3,
        "global_step_3",
        2,
    )
    assert any("actor-1 at step" in text and "killed by SIGKILL" in text for text in state.failures)
    assert ["(1 of 10 losses)" in text and "restarts actor-1" in text for text in state.decisions[:1]] == [True]
    wait_until(lambda: not left_of("loses-"))


class EndsAtItsStart(Worker):
    def __init__(self):
        super().__init__()
        os._exit(1)


def test_a_process_that_is_lost_at_its_start_ends_the_job_with_what_to_do(tmp_path):
    builder = DLJobBuilder().device_type("CPU").config({"out": str(tmp_path / "out")})
    builder.trainer(waits_after_a_commit).resource(**SMALL)
    job = builder.workload("actor", EndsAtItsStart).total(1).per_node(1).resource(**SMALL).build()
    with pytest.raises(WorkerLost) as lost:
        job.submit("ends-early", journal=str(tmp_path))
    assert lost.value.method == "setup" and "start the same command again" in lost.value.__notes__[0]


def test_processes_that_communicate_are_restarted_together(tmp_path):
    out = tmp_path / "out"
    assert described(loses_a_worker, out, victim=["actor", 1]).build().submit("together", journal=str(tmp_path)) == 0
    first, second = (line.split()[-2:] for line in out.read_text().splitlines())
    assert not set(first) & set(second)


def test_a_trainer_that_calls_recover_continues_with_the_same_groups(tmp_path):
    out = tmp_path / "out"
    job = described(recovers_a_worker, out, restart="process").build()
    assert job.submit("recovers", journal=str(tmp_path)) == 0
    first, *after = (re.findall(r"\{.*\}|\d+", line) for line in out.read_text().splitlines())
    assert [line[0] for line in after] == ["{'actor': [1]}"] * 3
    assert {line[1] for line in after} == {first[0]} and len({first[1], *(line[2] for line in after)}) == 4
    assert [line[3:] for line in after] == [["1", "2"]] * 3  # both answer


def test_a_lost_role_restarts_what_is_downstream_of_it_and_the_master_knows_the_new_processes(tmp_path):
    out = tmp_path / "out"
    builder = described(restarts_downstream, out, total=1, restart="downstream")
    builder.workload("rollout", A).resource(**SMALL).workload("reward", A).resource(**SMALL)
    builder.weights("actor", "rollout").feeds("reward", "actor")
    assert builder.build().submit("edges", journal=str(tmp_path)) == 0
    assert out.read_text() == "['actor', 'rollout'] True True\n"
    assert "restarts actor-0, rollout" in state_of(tmp_path).decisions[0]


def test_the_processes_of_a_node_are_restarted_together_and_no_others(tmp_path):
    out = tmp_path / "out"
    builder = described(loses_a_worker, out, total=4, victim=["actor", 3]).enable_node_group_failover()
    assert builder.build().submit("node", journal=str(tmp_path)) == 0
    first, second = (line.split()[-4:] for line in out.read_text().splitlines())
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])


def test_a_trainer_that_dies_finds_its_workers_unchanged_until_its_budget_is_used_up(tmp_path):
    out = tmp_path / "out"
    assert described(dies_itself, out, deaths=2, max_restart=2).build().submit("dies", journal=str(tmp_path)) == 0
    first, second, third = out.read_text().splitlines()
    assert first.startswith("0 0  {'actor': [0, 1]}") and second.startswith("1 1 global_step_1 {'actor': []}")
    assert third.startswith("2 2 global_step_2 {'actor': []}")
    assert first.split()[-2:] == second.split()[-2:] == third.split()[-2:]  # process ids

    with pytest.raises(WorkerLost, match="trainer-0 was lost.*killed by SIGKILL") as caught:
        described(dies_itself, tmp_path / "again", deaths=9, max_restart=1).build().submit(
            "dies", journal=str(tmp_path / "two")
        )
    [report] = [note for note in caught.value.__notes__ if "max_restart" in note]
    assert report.startswith("role 'trainer' was restarted once, which is the limit of max_restart(1), so the job ends")
    assert report.count("killed by SIGKILL") == 2 and "(step 2)" in report
    state = state_of(tmp_path / "two")
    assert state.state == JobPhase.FAILED and "trainer-0 was lost" in state.reason
    assert "the limit is 1 failure without 10 healthy steps, so the job ends" in state.decisions[-1]
    wait_until(lambda: not left_of("dies-"))


def test_an_exception_restarts_the_trainer_once_and_ends_the_job_when_it_repeats_at_the_same_step(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ArithmeticError, match="an error in the trainer") as caught:
        described(repeats_an_exception, out).build().submit("repeats", journal=str(tmp_path))
    assert out.read_text().split() == ["0", "1", "2"]  # at step 1, at step 2, and at step 2 again
    assert "in repeats_an_exception" in "".join(caught.value.__notes__)  # where it was raised
    state = state_of(tmp_path)
    assert state.state == JobPhase.FAILED and set(state.workers) == {"supervisor", "trainer-0", "actor-0", "actor-1"}
    assert not any("SIGKILL" in failure for failure in state.failures)  # the supervisor replaced the trainer


def test_an_own_error_that_repeats_ends_the_job_in_one_line_with_what_to_do(tmp_path):
    job = described(repeats_an_exception, tmp_path / "out", is_disk_full=True).build()
    with pytest.raises(StorageError, match="cannot write x") as caught:
        job.submit("full", journal=str(tmp_path))
    line = format_error(caught.value)
    assert "start the same command again" in line and "\n" not in line


def test_a_role_that_exceeds_its_budget_ends_the_job_with_a_report_that_names_it(tmp_path):
    with pytest.raises(WorkerLost, match="actor-1 was lost") as caught:
        described(recovers_a_worker, tmp_path / "out", restart="process", max_restart=1).build().submit(
            "often", journal=str(tmp_path)
        )
    assert any(
        "role 'actor' was restarted once, which is the limit of max_restart(1)" in note
        for note in caught.value.__notes__
    )
    state = state_of(tmp_path)
    assert state.state == JobPhase.FAILED and "actor-1" in state.reason
    assert "actor-1" in status(str(next(tmp_path.glob("often-*"))), None)
    wait_until(lambda: not left_of("often-"))


def test_a_restarted_supervisor_starts_the_job_again_from_its_commit(tmp_path):
    out, gate = tmp_path / "out", tmp_path / "gate"
    job = described(waits_after_a_commit, out, gate=str(gate)).build()
    running = job.submit("kept", blocking=False, journal=str(tmp_path))
    wait_until(lambda: out.exists() and out.read_text().count("\n") == 1)
    seen = ray.get(list_masters()[running.name].describe.remote(), timeout=30)
    wait_until(lambda: state_of(tmp_path).commit == "global_step_5")
    os.kill(seen["workers"]["supervisor"]["pid"], signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: out.read_text().count("\n") == 2)
    print(f"the job started again {time.monotonic() - killed_at:.1f} s after its supervisor was killed")
    gate.write_text("")
    assert running.wait(120) == 0
    first, second = (line.split() for line in out.read_text().splitlines())
    assert first[:3] == ["0", "0", "-"] and second[:3] == ["1", "5", "global_step_5"]
    assert not set(first[3:]) & set(second[3:])  # process ids
    assert not any(read_process_stat(worker["pid"]).state for worker in seen["workers"].values())
    assert state_of(tmp_path).state == JobPhase.SUCCEEDED
    wait_until(lambda: not left_of("kept-"))
