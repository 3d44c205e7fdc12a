import os
import re
import signal
import subprocess
import sys
import time

import pytest
import ray

from hybridrl.errors import CallTimeout, PlacementError, WorkerLost
from hybridrl.failure_policy import Budgets, Failure, FailureKind
from hybridrl.master.service import job_commands
from hybridrl.master.service.client import MasterClient, list_masters
from hybridrl.master.service.journal import history, replay
from hybridrl.master.state.tables import JobPhase
from hybridrl.single_controller.cluster import NAMESPACE
from hybridrl.single_controller.monitoring.process import report_decision
from hybridrl.single_controller.monitoring.work_done import ask_work, forget_work
from hybridrl.system.process_stat import STOPPED, read_process_stat
from tests.support.master.monitored_process import describe, monitored_adders, wait_for, wait_until_gone

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_job_is_monitored_from_its_start_to_its_end(tmp_path):
    with monitored_adders(tmp_path) as (client, group):
        client.report_step(1)
        client.report_commit(1, "global_step_1")
        client.report_step(2)
        seen = wait_for(client, lambda seen: seen["step"] == 2)
        assert (seen["state"], seen["commit"]) == (JobPhase.RUNNING, "global_step_1")
        assert [worker["pid"] for slot, worker in sorted(seen["workers"].items())] == [*group.process_ids, os.getpid()]
        beat = seen["beats"]["adder-0"]
        assert beat["memory"] > 2**24 and beat["doing"] is None
        assert 0 < beat["private"] < beat["memory"]
        assert set(beat["capacity"]) == {"memory", "/dev/shm", "Ray's directory"}
        assert all(0 < left <= total for left, total in beat["capacity"].values())
        call = group.execute_rank_async(0, "doze_until", str(tmp_path / "seen"))
        seen = wait_for(client, lambda seen: seen["beats"]["adder-0"]["doing"] == "adder.doze_until")
        (tmp_path / "seen").touch()
        group.fetch([call])
    wait_until_gone(
        client.run, *(worker["pid"] for slot, worker in seen["workers"].items() if slot != "trainer"), seen["pid"]
    )
    state, _ = replay(str(tmp_path / client.run))
    assert (state.state, state.reason) == (JobPhase.SUCCEEDED, "done")
    assert state.failures == ()  # the shutdown of the group at the end is none
    names = [type(entry.event).__name__ for entry in history(str(tmp_path / client.run))]
    events = [name for name in names if name != "WarningRaised"]  # a warning: this machine's disk is nearly full
    assert len(events) == 7, events  # start, 2 joins, 2 steps, a commit, end


def test_a_driver_finds_busy_processes_and_their_work_without_calling_them(tmp_path):
    with monitored_adders(tmp_path, num_ranks=2) as (client, group):
        forget_work()  # of an earlier test in this process
        counting = group.count.submit(100, str(tmp_path / "seen"))
        wait_for(client, lambda seen: str(ask_work()) == "100 of 200 rows")
        (tmp_path / "seen").touch()
        ray.get([*counting])
        wait_for(client, lambda seen: ask_work() is None)
        busy = [group.execute_rank_async(rank, "doze", 80.0) for rank in range(2)]
        wait_for(client, lambda seen: all(seen["beats"][f"adder-{rank}"]["doing"] == "adder.doze" for rank in range(2)))
        workers = describe(client)["workers"]
        assert not ray.wait(busy, timeout=0)[0]
        here = ray.get_runtime_context().get_node_id()
        for rank, (name, pid) in enumerate(zip(group.worker_names, group.process_ids, strict=True)):
            found = workers[f"adder-{rank}"]
            assert [found[key] for key in ("name", "pid", "node", "rank", "group_size")] == [name, pid, here, rank, 2]
            assert found["state"] == "alive"
            assert ray.get_actor(found["name"], namespace=NAMESPACE)._actor_id == group.workers[rank]._actor_id


def test_the_error_that_the_driver_gets_has_the_reason_of_the_death(tmp_path):
    with pytest.raises(WorkerLost) as caught, monitored_adders(tmp_path) as (client, group):
        try:
            group.execute_rank(0, "die_on", 0)
        except WorkerLost as lost:
            client.add_exit_reason(lost)
            raise
    assert caught.value.cause.startswith("killed by SIGKILL")
    assert str(caught.value).startswith("worker adder-0 was lost while running die_on(): killed by SIGKILL")
    wait_until_gone(client.run)
    state, _ = replay(str(tmp_path / client.run))
    assert (state.state, state.workers["adder-0"].incarnation) == (JobPhase.FAILED, 1)
    assert "was lost while running die_on()" in state.reason


def test_two_runs_of_a_job_have_a_master_each_and_a_run_has_only_one(tmp_path):
    with MasterClient(job="job", run="job-a", journal=str(tmp_path / "a")) as first:
        with MasterClient(job="job", run="job-b", journal=str(tmp_path / "b")) as second:
            assert {"job-a", "job-b"} <= set(list_masters())
            assert describe(first)["pid"] != describe(second)["pid"]
            with pytest.raises(PlacementError, match="'job-a' has a master"):
                MasterClient(job="job", run="job-a", journal=str(tmp_path / "a"))
        wait_until_gone("job-b")
    wait_until_gone("job-a")


def test_a_requested_stop_reaches_the_driver(tmp_path):
    received: list[str] = []
    with MasterClient(job="job", run="job-c", journal=str(tmp_path), on_stop=received.append) as client:
        wait_for(client, lambda seen: "trainer" in seen["beats"])
        client.master.stop.remote("requested by a test")
        wait_for(client, lambda seen: received)
    assert received[0] == "requested by a test"
    assert replay(str(tmp_path))[0].state in (JobPhase.SUCCEEDED, JobPhase.STOPPED)


def test_a_reported_decision_is_in_the_journal_and_in_the_status(tmp_path):
    with MasterClient(job="job", run="job-f", journal=str(tmp_path)) as client:
        client.report_step(3)
        decision = Budgets().spend(Failure(FailureKind.WORKER_LOST, "actor-0 was lost", target="role actor"))
        report_decision(decision)
        seen = wait_for(client, lambda seen: seen["decisions"])
        assert seen["decisions"] == (f"step 3: {decision}",) and seen["state"] == JobPhase.RUNNING
        assert f"decision: step 3: {decision}\n" in job_commands.status("job-f", None)
    [event] = [one.event for one in history(str(tmp_path)) if type(one.event).__name__ == "RecoveryDecided"]
    assert (event.scope, event.source, event.executor, event.used, event.limit) == (
        "role",
        "newest snapshot",
        "trainer",
        1,
        3,
    )
    assert replay(str(tmp_path))[0].decisions == (f"step 3: {decision}",)


def test_a_driver_that_dies_before_its_first_message_leaves_no_master_behind(tmp_path):
    program = (
        "import os, sys, ray\n"
        "from hybridrl.master.service.client import start_master\n"
        "from hybridrl.master.state.events import JobStarted\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "ray.get(start_master(JobStarted('job', 'job-e'), sys.argv[2]).describe.remote())\n"
        "os.kill(os.getpid(), 9)\n"
    )
    address = ray.get_runtime_context().gcs_address
    subprocess.run([sys.executable, "-c", program, address, str(tmp_path)], timeout=100)
    wait_until_gone("job-e", timeout_s=60)
    assert replay(str(tmp_path))[0].state == JobPhase.FAILED


@pytest.mark.slow
def test_a_straggler_appears_in_the_trainers_log_and_in_the_status(tmp_path, caplog):
    with monitored_adders(tmp_path, num_ranks=2) as (client, group):
        for _ in range(10):
            group.fetch([group.execute_rank_async(rank, "doze", seconds) for rank, seconds in enumerate((0.05, 0.65))])
        warning = wait_for(client, lambda seen: seen["warnings"])["warnings"][0]
        assert re.match(
            r"adder-1: it is slow: adder.doze took 0\.[67]\d s .* and 0\.\d\d s for its peer, \d+\.\d times as long",
            warning,
        )
        wait_for(client, lambda seen: warning in caplog.messages)
        assert f"warning: {warning}\n" in job_commands.status(client.run, None)


@pytest.mark.slow
def test_a_call_past_its_deadline_is_a_failure_and_its_stack_is_inspected_at_once(tmp_path):
    with monitored_adders(tmp_path, num_ranks=2) as (client, group):
        late = [group.execute_rank_async(rank, "doze", seconds) for rank, seconds in enumerate((0.01, 60.0))]
        with pytest.raises(CallTimeout, match="did not answer within 2 s; .*rank 1;"):
            group.fetch(late, method="doze", timeout_s=2.0)
        start = time.monotonic()
        seen = wait_for(client, lambda seen: seen["warnings"])
        assert time.monotonic() - start < 2
        assert seen["failures"] == (
            "adder-1 at step 0: adder.doze() did not answer within 2 s; still waiting for rank 1",
        )
        assert re.match(
            r"adder-1: it blocks the job: it alone has not answered, and it is at .*sample_workers.py:\d+ in doze",
            seen["warnings"][0],
        )
        with open(seen["warnings"][0].partition("stacks: ")[2]) as f:
            assert f.read().startswith("== adder-1\n")
        assert seen["workers"]["adder-1"]["state"] == "alive"


def test_reports_never_block_and_arrive_after_the_master_was_frozen(tmp_path):
    with MasterClient(job="job", run="job-d", journal=str(tmp_path)) as client:
        pid = wait_for(client, lambda seen: "trainer" in seen["beats"])["pid"]
        os.kill(pid, signal.SIGSTOP)
        while read_process_stat(pid).state != STOPPED:
            time.sleep(0.01)
        for step in range(1, 101):
            client.report_step(step)
        assert read_process_stat(pid).state == STOPPED  # nobody has read a report yet
        os.kill(pid, signal.SIGCONT)
        assert wait_for(client, lambda seen: seen["step"] == 100)["pid"] == pid
    assert [entry.event.step for entry in history(str(tmp_path)) if hasattr(entry.event, "step")] == list(range(1, 101))
