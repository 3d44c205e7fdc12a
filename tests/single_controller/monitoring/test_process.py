"""What a process has once: filled by the modules around it, and emptied for the next test."""

import asyncio
import threading
import time

import pytest

from hybridrl.single_controller.monitoring.process import PROCESS, PartTimes, mark_lost
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
    PROCESS.register_actors({"0a": ("actor", 0)})
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


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        ({"group": 2.0}, {"group": 2.0, "model": 5.0}),
        ({"group": 2.0, "load": 4.0}, {"group": 2.0, "load": 4.0, "model": 1.0}),
        ({"group": 9.0}, {"group": 7.0, "model": 0.0}),  # a process began to measure before its caller did
        ({}, {"model": 7.0}),
    ],
)
def test_the_parts_inside_a_part_are_counted_once_and_come_before_it(inner, found):
    times = PartTimes(start=1.0, model=7.0)
    times.split("model", inner)
    assert list(times.items()) == [("start", 1.0), *found.items()]


def test_a_part_is_counted_also_if_it_fails_and_draining_starts_again():
    times = PartTimes()
    with pytest.raises(KeyError), times.part("kill"):
        raise KeyError
    assert list(times) == ["kill"] and times["kill"] >= 0
    assert list(times.drain()) == ["kill"] and times == {}


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
