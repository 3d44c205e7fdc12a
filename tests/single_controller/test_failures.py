"""Which error a caller gets when a worker, a node or the driver fails, and how soon."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

from hybridrl.errors import PlacementError, WorkerLost
from hybridrl.protocol import DataProto
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Adder, Doubler, Waiter

pytestmark = pytest.mark.usefixtures("ray_cluster")
DRIVER = Path(__file__).parents[1] / "support/single_controller/interrupted_driver.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool():
    with RayResourcePool([2], name_prefix="failures") as pool:
        yield pool


@pytest.fixture(scope="module")
def healthy(ray_cluster):
    """One group for the tests that leave it unharmed."""
    with (
        RayResourcePool([2], name_prefix="healthy") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Waiter), role="twin", name_prefix="same", share=0.5) as group,
    ):
        yield group


def test_a_death_in_a_collective_is_reported_instead_of_the_errors_of_its_peers(pool, tmp_path):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Waiter), role="waiter") as group:
        victim, path = group.process_ids[1], tmp_path / "the first collective has ended"
        subprocess.Popen(["sh", "-c", f"until [ -e '{path}' ]; do sleep 0.1; done; sleep 0.5; kill -9 {victim}"])
        with pytest.raises(WorkerLost, match=r"worker waiter-1 was lost while running reduce_until_killed\(\)"):
            group.reduce_until_killed(1, str(path))


def test_a_timeout_of_a_peer_is_taken_for_a_consequence_of_the_death(pool):
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1), role="adder") as group,
        pytest.raises(WorkerLost, match=r"worker adder-1 was lost while running give_up_on\(\)"),
    ):
        group.give_up_on(1)


def test_a_result_that_is_lost_with_its_worker_is_attributed_to_that_worker(pool, healthy):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Waiter), role="maker") as maker:
        sleeping = maker.execute_rank_async(1, "sleep_in_thread", 30.0)
        made = maker.count_up(0)
        os.kill(maker.process_ids[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="worker maker-1 was lost"):
            healthy.pass_on(replace(made, futures=[made.futures[0], sleeping]))


def test_a_module_that_workers_cannot_import_is_an_import_error_with_an_address(pool, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "from hybridrl.single_controller.worker import Worker\nclass Here(Worker): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    with pytest.raises(ModuleNotFoundError, match="only_here") as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(only_here.Here), role="traveller")
    assert caught.value.__notes__[0].startswith("raised in worker-")


def test_a_group_that_could_not_start_keeps_the_error_leaves_no_process_and_frees_its_share(pool):
    with pytest.raises(ValueError, match="a mistake in the constructor") as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(Doubler, fail=True), role="doubler", name_prefix="again", share=1.0)
    assert caught.value.__notes__ in (["raised in doubler-0, setup()"], ["raised in doubler-1, setup()"])
    with RayWorkerGroup(pool, RayClassWithInitArgs(Doubler), role="doubler", name_prefix="again", share=1.0) as group:
        assert len(group.pid()) == 2


def test_the_error_for_a_name_in_use_says_what_to_do(pool, healthy):
    with pytest.raises(PlacementError, match="'same/twin-0' is running .*already; attach"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Waiter), role="twin", name_prefix="same", share=0.5)


def test_a_liveness_check_reports_a_death_between_calls(pool):
    reported = []
    with RayWorkerGroup(pool, RayClassWithInitArgs(Waiter), role="watched") as group:
        group.start_worker_aliveness_check(0.1, on_lost=reported.append)
        os.kill(group.process_ids[1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not reported and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [(lost.role, lost.rank) for lost in reported] == [("watched", 1)]
        with pytest.raises(WorkerLost, match="watched-1"):
            group.execute_rank(0, "variable", "RANK")


def test_attaching_names_a_missing_process_and_refuses_no_names():
    with pytest.raises(PlacementError, match="no worker process named 'nobody/actor-0'"):
        RayWorkerGroup.from_detached(worker_names=["nobody/actor-0"])
    with pytest.raises(ValueError, match="name the processes: worker_names="):
        RayWorkerGroup.from_detached()


def test_attaching_to_half_of_a_group_is_refused(healthy):
    with pytest.raises(PlacementError, match=r"ranks \[0\] of 2; .*every process"):
        RayWorkerGroup.from_detached(worker_names=healthy.worker_names[:1])


def processes_of(job: str) -> list[str]:
    return [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"{job}/")
    ]


def test_ctrl_c_ends_a_waiting_driver_and_leaves_no_process_and_no_reservation(tmp_path):
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), address, str(tmp_path / "started")], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 90
    while not all((tmp_path / f"started.{rank}").exists() for rank in range(2)):
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert len(processes_of("interrupted")) == 2
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=45) == 130  # its workers would sleep for 50 s
    assert processes_of("interrupted") == []
    leftover = [
        pg
        for pg in placement_group_table().values()
        if pg["name"].startswith("interrupted") and pg["state"] != "REMOVED"
    ]
    assert leftover == []


def test_a_received_batch_may_be_written_to(healthy):
    data = DataProto.from_dict({"x": torch.arange(6)})
    out = healthy.pass_on(data)
    out.batch["x"].add_(1)
    assert out.batch["x"].tolist() == [1, 2, 3, 4, 5, 6] and data.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.timeout(300)  # four processes start one after the other
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, 0])
@pytest.mark.slow
def test_a_dead_frozen_or_healthy_process_is_replaced_on_its_slot_and_its_peer_is_not_affected(pool, number):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Doubler), role="doubler") as group:
        before, names = list(group.process_ids), list(group.worker_names)
        os.kill(before[1], number)
        group.respawn(1)
        assert group.process_ids[0] == before[0] and group.process_ids[1] != before[1]
        assert group.worker_names == [names[0], f"{names[1]}.2"]
        assert group.pid() == group.process_ids
        stat = Path(f"/proc/{before[1]}/stat")
        assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.timeout(300)  # four processes start
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rebuilt_group_forms_a_new_process_group_and_its_earlier_outputs_stay(pool, number):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1), role="adder") as group:
        outputs = group.add_async(DataProto.from_dict({"x": torch.arange(200_000)}))
        assert group.sum_ranks() == [1.0, 1.0]
        outputs.get()
        before = list(group.process_ids)
        os.kill(before[1], number)
        group.rebuild()
        assert (
            not set(group.process_ids) & set(before)
            and [pid for _, _, pid in group.rank_and_pid()] == group.process_ids
        )
        assert group.sum_ranks() == [1.0, 1.0]
        assert outputs.get().batch["x"].tolist() == list(range(1, 200_001))
