"""The snapshot store of a supervised driver is lost, killed or frozen: the next snapshot has another one."""

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from hybridrl.driver.run_context import DriverLifecycle
from hybridrl.errors import ObjectLost, WorkerLost
from hybridrl.single_controller.cluster import find_actor, process_here, snapshot_store_name
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes import termination
from hybridrl.single_controller.processes.termination import kill_process
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.system.process_stat import read_process_stat
from hybridrl.trainer.recovery import snapshots
from hybridrl.trainer.recovery.policies import StepSnapshot, are_stored
from hybridrl.trainer.recovery.snapshots import STORE_TIMEOUT_S, SurvivingState, load_snapshot, load_surviving_state

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(180)]
RUN = "snapshots-test"
STORE = snapshot_store_name(RUN)
FILE = f"{tempfile.gettempdir()}/snapshots-test-{os.getuid()}"


class Keeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def take(self) -> np.ndarray:
        return np.full(200_000, self.rank, dtype=np.uint8)  # too large to travel with the answer

    @register(Dispatch.ONE_TO_ALL)
    def take_with_file(self) -> np.ndarray:
        while not os.path.exists(FILE):
            time.sleep(0.01)
        return self.take()

    @register(Dispatch.ALL_TO_ALL)
    def add_up(self, parts: np.ndarray) -> int:
        return int(parts.sum())


@pytest.fixture(scope="module")
def group(ray_cluster):
    """One group for all tests: they end the store, not its processes."""
    with RayResourcePool([2]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Keeper), role="keeper") as started:
        yield started


@pytest.fixture
def state():
    state = SurvivingState(RUN)
    yield state
    state.drop()
    while find_actor(STORE) is not None:
        time.sleep(0.05)


def store_pid():
    return process_here(find_actor(STORE))


def take(state, groups, step):
    refs = state.call_surviving(groups, "take")
    state.store(StepSnapshot(step, refs, {"driver": step}))
    return refs


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_lost_store_is_replaced_within_the_snapshot_of_all_groups(state, group, number, caplog):
    groups = {"keeper": group, "twin": group}
    take(state, groups, 1)
    pid = store_pid()
    os.kill(pid, number)
    start = time.monotonic()
    refs = take(state, groups, 2)
    assert time.monotonic() - start < STORE_TIMEOUT_S  # a frozen one is killed after 4.5 s
    while read_process_stat(pid).state:
        assert time.monotonic() - start < STORE_TIMEOUT_S
        time.sleep(0.05)
    assert store_pid() != pid
    assert "snapshot store of snapshots-test was lost" in caplog.text
    for parts in refs.values():
        assert group.add_up(parts) == [0, 200_000]
    stored = load_snapshot(find_actor(STORE))
    assert (stored.step, stored.states) == (2, {"driver": 2}) and stored.engine_refs.keys() == groups.keys()


def test_a_snapshot_counts_when_all_ranks_have_stored_it(state):
    def begin(group, step):
        refs = state.submit_surviving({"keeper": group}, "take_with_file")
        state.store(StepSnapshot(step, refs, {}))
        return refs

    file = Path(FILE)
    file.touch()
    try:
        with RayResourcePool([1]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Keeper), role="lost") as group:
            assert are_stored(begin(group, 1), timeout_s=STORE_TIMEOUT_S)
            assert are_stored(begin(group, 2), timeout_s=STORE_TIMEOUT_S)
            assert load_snapshot(find_actor(STORE)).step == 2
            file.unlink()
            refs = begin(group, 3)
            assert not are_stored(refs, timeout_s=0.1)
            os.kill(group.process_ids[0], signal.SIGKILL)
            with pytest.raises(WorkerLost):
                state.call_surviving({"keeper": group}, "take_with_file", started=refs)
            assert load_snapshot(find_actor(STORE)).step == 2
    finally:
        file.unlink(missing_ok=True)


def test_a_driver_resumes_from_the_newest_job_that_has_a_snapshot_else_all_of_them_end(group):
    lifecycle = DriverLifecycle()
    lifecycle.attempt = 4
    second = SurvivingState(f"{RUN}.2")  # attempt 1 left no snapshot, and attempt 3 resumed from one
    take(second, {"keeper": group}, 5)
    found = load_surviving_state(RUN, lifecycle)
    assert (found.run_name, found.snapshot.step) == (f"{RUN}.2", 5)
    second.drop()
    left = [f"{RUN}.2", RUN]
    for name in left:
        snapshots.start_snapshot_store(name)
    assert load_surviving_state(RUN, lifecycle).run_name == f"{RUN}.4"
    until = time.monotonic() + 60
    while any(find_actor(snapshot_store_name(name)) for name in left):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_a_lost_store_held_is_an_object_that_is_lost(state, group):
    refs = take(state, {"keeper": group}, 1)
    os.kill(store_pid(), signal.SIGKILL)
    with pytest.raises(ObjectLost, match="snapshot store; restart the run"):
        until = time.monotonic() + 60
        while time.monotonic() < until:  # until Ray has noticed
            group.add_up(refs["keeper"])
            time.sleep(0.2)


def test_a_store_that_is_lost_again_and_again_ends_the_run_with_a_readable_error(state, group, monkeypatch):
    state.call_surviving({"keeper": group}, "take")
    started = snapshots.start_snapshot_store

    def start_lost(run):
        store = started(run)
        ray.kill(store, no_restart=True)
        return store

    monkeypatch.setattr(snapshots, "start_snapshot_store", start_lost)
    ray.kill(find_actor(STORE), no_restart=True)
    with pytest.raises(ObjectLost, match=r"lost 3 times .*\(ActorDiedError.*; restart the run"):
        state.call_surviving({"keeper": group}, "take")
    assert find_actor(STORE) is None, STORE


@pytest.mark.parametrize("is_frozen", [False, True])
def test_ray_ends_a_store_and_only_a_frozen_process_is_killed(state, group, monkeypatch, is_frozen):
    take(state, {"keeper": group}, 1)
    pid, had_ended = store_pid(), []

    def kill(process_id, **how):
        had_ended.append(read_process_stat(process_id).state == "")
        kill_process(process_id, **how)

    monkeypatch.setattr(termination, "kill_process", kill)
    if is_frozen:
        os.kill(pid, signal.SIGSTOP)
    state.drop()
    assert had_ended == [not is_frozen]
    until = time.monotonic() + 20.0
    while read_process_stat(pid).state:
        assert time.monotonic() < until
        time.sleep(0.05)
