"""What a process has once: filled by the modules around it, and emptied for the next test."""

import asyncio
import threading
import time

import pytest

from hybridrl.single_controller.awaiting import register_actors
from hybridrl.single_controller.monitoring.lost_workers import mark_lost
from hybridrl.single_controller.monitoring.process_state import PROCESS
from hybridrl.single_controller.monitoring.tracing import is_recording, span, start_recording
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.references import resolve_awaitable
from tests.support.single_controller.sample_workers import Adder


@pytest.fixture(autouse=True)
def new_process():
    PROCESS.reset()
    yield
    PROCESS.reset()


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_reset_ends_the_recording_and_the_event_loop_and_empties_the_tables(tmp_path):
    start_recording(str(tmp_path), "driver")
    register_actors({"0a": ("actor", 0)})
    mark_lost("0a", "killed by SIGKILL")
    assert resolve_awaitable(thread_name()) == "coroutines"
    loop = PROCESS.event_loop
    PROCESS.reset()
    assert not is_recording() and not PROCESS.addresses and not PROCESS.lost_reasons
    until = time.monotonic() + 60
    while loop.is_running() and time.monotonic() < until:
        time.sleep(0.01)
    assert not loop.is_running()
    assert resolve_awaitable(thread_name()) == "coroutines" and PROCESS.event_loop is not loop


def test_a_run_that_ends_its_trace_leaves_that_of_another_run_alone(tmp_path):
    first = start_recording(str(tmp_path / "first"), "driver")
    second = start_recording(str(tmp_path / "second"), "driver")
    first.close()
    with span("stage", "reward"):
        pass
    second.close()
    assert not is_recording()
    assert "reward" in (tmp_path / "second/driver.jsonl").read_text()
    assert (tmp_path / "first/driver.jsonl").read_text() == ""


@pytest.mark.usefixtures("ray_cluster")
def test_actors_that_have_ended_leave_the_tables():
    with RayResourcePool([1]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1), role="adder") as group:
        ids = []
        for _ in range(3):
            ids.append(group.workers[0]._actor_id.hex())
            mark_lost(ids[-1], "killed")
            group.respawn(0)
        present = group.workers[0]._actor_id.hex()
        # The last one that was replaced stays: a call to it may still be awaited.
        assert PROCESS.addresses == {ids[-1]: ("adder", 0), present: ("adder", 0)}
        assert PROCESS.lost_reasons.keys() == {ids[-1]}
    assert PROCESS.addresses == {} and PROCESS.lost_reasons == {}
