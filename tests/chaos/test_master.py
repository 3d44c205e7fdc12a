"""Workers and masters that are killed or frozen: what the master reports, how soon, and what works without it."""

import os
import signal
import threading
import time

import pytest

from hybridrl.errors import WorkerLost
from hybridrl.master.service.client import MasterClient
from hybridrl.master.service.journal import history
from hybridrl.master.state.tables import JobPhase
from hybridrl.single_controller.cluster import process_here
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.system.process_stat import read_process_stat
from tests.support.master.monitored_process import describe, monitored_adders, wait_for, wait_until_gone
from tests.support.single_controller.sample_workers import Adder

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_cluster")]


def test_a_killed_master_is_restarted_while_the_job_runs(tmp_path):
    with monitored_adders(tmp_path, num_ranks=2) as (watch, group):
        watch.report_step(1)
        before = wait_for(watch, lambda seen: seen["state"] == JobPhase.RUNNING)
        slowest, stopped = [0.0], threading.Event()

        def train():
            while not stopped.is_set():
                start = time.monotonic()
                assert group.own([1, 2]) == [10, 21]
                slowest[0] = max(slowest[0], time.monotonic() - start)

        training = threading.Thread(target=train)
        training.start()
        killed = time.monotonic()
        os.kill(before["pid"], signal.SIGKILL)
        watch.report_step(2)  # no master receives this yet
        after = wait_for(
            watch, lambda seen: seen["pid"] != before["pid"] and sum(map(bool, seen["beats"].values())) == 3
        )
        seconds = time.monotonic() - killed
        stopped.set()
        training.join()
        assert wait_for(watch, lambda seen: seen["step"] == 2)["failures"] == ()
        assert {slot: worker["pid"] for slot, worker in after["workers"].items()} == {
            slot: worker["pid"] for slot, worker in before["workers"].items()
        }
        assert after["state"] == JobPhase.RUNNING
        print(f"master back in {seconds:.2f} s, slowest call meanwhile {slowest[0]:.3f} s")
        assert seconds < 6
        assert slowest[0] < 2
    wait_until_gone(watch.run, after["pid"])


def test_a_frozen_master_is_killed_by_the_driver_and_restarted(tmp_path):
    with monitored_adders(tmp_path) as (watch, group):
        pid = describe(watch)["pid"]
        os.kill(pid, signal.SIGSTOP)
        frozen = time.monotonic()
        while read_process_stat(pid).state:
            assert time.monotonic() < frozen + 10
            time.sleep(0.01)
        print(f"a frozen master was killed {time.monotonic() - frozen:.1f} s after it stopped")
        watch.report_step(1)
        after = wait_for(watch, lambda seen: seen["pid"] != pid and seen["step"] == 1)
        assert after["failures"] == () and group.own([1]) == [10]
    wait_until_gone(watch.run, after["pid"])


def test_a_master_that_is_frozen_before_it_has_answered_is_restarted_too(tmp_path):
    with MasterClient(job="early", run="early-freeze", journal=str(tmp_path)) as watch:
        while not (pid := process_here(watch.master)):
            time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)
        frozen = time.monotonic()
        while read_process_stat(pid).state:
            assert time.monotonic() < frozen + 10
            time.sleep(0.01)
        after = wait_for(watch, lambda seen: seen["pid"] != pid)
    wait_until_gone(watch.run, after["pid"])


def test_a_worker_that_died_while_the_master_was_down_is_found_dead(tmp_path):
    with pytest.raises(RuntimeError, match="enough"), monitored_adders(tmp_path) as (watch, group):
        pid = describe(watch)["pid"]
        os.kill(pid, signal.SIGKILL)
        os.kill(group.process_ids[0], signal.SIGKILL)
        seen = wait_for(watch, lambda seen: seen["pid"] != pid and seen["failures"])
        assert "adder-0" in seen["failures"][0]
        raise RuntimeError("enough")
    wait_until_gone(watch.run)


@pytest.mark.parametrize(
    "number, cause",
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
        (signal.SIGABRT, "killed by SIGABRT"),
    ],
)
def test_a_death_is_reported_in_half_a_second_with_its_cause(tmp_path, number, cause):
    with pytest.raises(RuntimeError, match="enough"), monitored_adders(tmp_path) as (watch, group):
        killed = time.time()
        os.kill(group.process_ids[0], number)
        seen = wait_for(watch, lambda seen: seen["failures"])
        reported = next(entry.at for entry in history(seen["journal"]) if type(entry.event).__name__ == "WorkerFailed")
        print(f"{cause}: reported {reported - killed:.3f} s after it")
        assert seen["failures"][0].startswith(f"adder-0 at step 0: {cause}")
        assert reported - killed < 0.5
        raise RuntimeError("enough")
    wait_until_gone(watch.run)


def test_a_frozen_worker_is_reported_in_six_seconds_killed_and_named_in_the_drivers_error(tmp_path):
    with pytest.raises(WorkerLost) as caught, monitored_adders(tmp_path) as (watch, group):
        threading.Timer(1.5, os.kill, (group.process_ids[0], signal.SIGSTOP)).start()
        frozen = time.monotonic() + 1.5
        try:
            group.doze(60.0)
        except WorkerLost as lost:
            seconds = time.monotonic() - frozen
            watch.add_exit_reason(lost)
            print(f"a freeze was reported and ended in {seconds:.2f} s: {lost}")
            assert seconds < 6
            raise
    assert "frozen: its process is stopped (SIGSTOP)" in caught.value.cause
    assert "in adder.doze for" in caught.value.cause
    wait_until_gone(watch.run)


def test_a_long_call_that_holds_the_gil_is_no_freeze(tmp_path):
    with monitored_adders(tmp_path) as (watch, group):
        hold = group.execute_rank_async(0, "execute_func_rank_zero", _hold_the_gil)
        seen = wait_for(watch, lambda seen: seen["workers"]["adder-0"]["state"] == "silent")
        assert group.fetch([hold]) == [None]
        seen = wait_for(watch, lambda seen: seen["workers"]["adder-0"]["state"] == "alive")
        assert seen["failures"] == () and seen["state"] == JobPhase.STARTING


def test_the_rank_that_others_wait_for_is_named_with_its_stack(tmp_path):
    with monitored_adders(tmp_path, num_ranks=2, hang_s=2.0) as (watch, group):
        group.sum_ranks()
        waiting = group.execute_rank_async(0, "sum_ranks")  # a collective that rank 1 never enters
        seen = wait_for(watch, lambda seen: seen["warnings"])
        assert seen["warnings"][0].startswith("adder-1: it blocks the job: it is idle for")
        with open(seen["warnings"][0].partition("stacks: ")[2]) as f:
            assert "== adder-0" in f.read()
        group.execute_rank(1, "sum_ranks")
        group.fetch([waiting])


def test_frozen_processes_end_with_their_group_without_a_master():
    with RayResourcePool([2]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1), role="adder") as group:
        ids = list(group.process_ids)
        os.kill(ids[1], signal.SIGSTOP)
        start = time.monotonic()
        group.shutdown()
        while any(read_process_stat(pid).state for pid in ids):
            assert time.monotonic() < start + 10
            time.sleep(0.01)


def _hold_the_gil():
    """Spend 8 s in C without releasing the GIL."""
    import ctypes

    ctypes.PyDLL(None).sleep(8)
